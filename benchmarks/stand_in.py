"""A service that answers every request immediately, so that only the client is measured.

python benchmarks/stand_in.py PORT [--tokens 64]

Raw asyncio and httptools; results are written once, by our own codec.
"""

import argparse
import asyncio
import itertools

import httptools
import numpy as np
import orjson
import uvloop

from tinkex import types
from tinkex._wire import json_codec, proto_codec
from tinkex._wire.media_types import PROTOBUF

PROTO = PROTOBUF.encode()
JSON = b"application/json"
#: The promise of each path; the letter selects the result of its poll.
PROMISES = {
    b"/api/v1/asample": "s",
    b"/api/v1/forward_backward": "f",
    b"/api/v1/forward": "f",
    b"/api/v1/optim_step": "o",
    b"/api/v1/create_model": "m",
}
DIRECT = {
    b"/api/v1/create_session": b'{"session_id":"bench"}',
    b"/api/v1/create_sampling_session": b'{"sampling_session_id":"bench:sample:0"}',
    b"/api/v1/session_heartbeat": b"{}",
    b"/api/v1/sessions/bench/finish": b"{}",
    b"/api/v1/telemetry": b'{"status":"accepted"}',
    b"/api/v1/client/config": b"{}",
    b"/api/v1/client/dynamic_config": b"{}",
}


def results(tokens):
    ids, logprobs = np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32)
    sample = types.SampleResponse([types.SampledSequence("length", "", ids, logprobs)])
    output = types.ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 1.25})
    return {
        "s": (proto_codec.encode_sample_response(sample), PROTO),
        "f": (proto_codec.encode_forward_backward_output(output), PROTO),
        "o": (b'{"metrics":{}}', JSON),
        "m": (json_codec.encode(types.CreateModelResponse(model_id="bench:train:0")), JSON),
    }


class Connection(asyncio.Protocol):
    results: dict
    numbers = itertools.count()

    def connection_made(self, transport):
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.path, self.body = b"", b""

    def data_received(self, data):
        self.parser.feed_data(data)

    def on_url(self, url):
        self.path += url

    def on_body(self, body):
        self.body += body

    def on_message_complete(self):
        path, body, self.path, self.body = self.path, self.body, b"", b""
        if path == b"/api/v1/retrieve_future":
            self.send(*self.results[orjson.loads(body)["request_id"][0]])
        elif path in PROMISES:
            number = next(self.numbers)
            promise = {
                "request_id": f"{PROMISES[path]}{number}",
                "sample_sequence_ids": [f"q{number}"],
            }
            self.send(orjson.dumps(promise), JSON)
        else:
            self.send(DIRECT.get(path, b"{}"), JSON)

    def send(self, body, content_type):
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (content_type, len(body)) + body)


async def serve(port):
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    Connection.results = results(arguments.tokens)
    uvloop.run(serve(arguments.port))
