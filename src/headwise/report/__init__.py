"""Records in, tables and pages out. No torch."""
