"""The client: runtime, transport, sessions, futures and the four public clients."""
