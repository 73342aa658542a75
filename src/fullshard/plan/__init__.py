"""Know before a launch: dry runs."""
