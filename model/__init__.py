"""The decoder, its position encodings, and what trains and evaluates it. Importing this loads no torch."""
