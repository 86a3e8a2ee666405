"""Commands that ask a cluster's scheduler, and its nodes' pages."""
