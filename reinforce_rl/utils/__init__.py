"""What other programs would need as well: processes."""
