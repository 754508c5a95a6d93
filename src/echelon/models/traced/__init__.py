"""Any module as a graph of operators: traced once for each signature of its inputs, and run from the graph."""
