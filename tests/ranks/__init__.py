"""On 2, 3 and 4 gloo ranks, all from the one pool of the session."""
