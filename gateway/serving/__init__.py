"""Everything with input or output."""
