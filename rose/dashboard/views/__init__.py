"""Contents of the dashboard's pages."""
