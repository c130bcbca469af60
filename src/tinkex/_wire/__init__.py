"""The protocol: the table of operations and the codecs both halves speak. Knows no sockets."""
