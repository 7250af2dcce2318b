"""Sessions: their histories, the store that owns them, and the journal that every change goes through first."""
