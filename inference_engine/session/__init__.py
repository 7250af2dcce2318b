"""Durable histories: sessions, the store that owns them, and the journal every change goes through first."""
