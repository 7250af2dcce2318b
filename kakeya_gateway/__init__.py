"""The gateway: other people's APIs, each conversation a session of a Kakeya server. It knows the Python SDK alone."""
