"""The gRPC face of an engine: thin, asynchronous, and the only room besides the SDK that knows the wire."""
