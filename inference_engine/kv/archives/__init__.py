"""How entries that left the exact window are kept, and how they come back."""
