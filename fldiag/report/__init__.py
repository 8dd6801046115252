"""One page without network that shows runs and the tables that lie in them; it measures nothing."""
