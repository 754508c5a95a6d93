"""Does a layout compute what one device computes? `verify` runs both and compares every number."""
