"""What the dashboard's pages show."""
