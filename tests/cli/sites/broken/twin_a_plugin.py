"""One of two distributions that claim the same plugin name; it is never imported."""
