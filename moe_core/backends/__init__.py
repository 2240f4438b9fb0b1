"""Built-in backends, registered through the same hooks as any other."""
