"""A tokenizer that notes what it encodes, and waits where it is told to."""

import threading

from mooncake_lab.serving.openai_api.tokenizer import ByteTokenizer


class WaitingTokenizer:
    """Bytes; a text that begins with `wait` takes until `go_on` is set."""

    end_tokens = ()

    def __init__(self, most_characters_a_token=1):
        self.most_characters_a_token = most_characters_a_token
        self.encoded, self.waiting, self.go_on = [], threading.Semaphore(0), threading.Event()
        self.bytes = ByteTokenizer()

    def encode(self, text):
        """Its bytes."""
        self.encoded.append(text)
        if text.startswith("wait"):
            self.waiting.release()
            assert self.go_on.wait(60)
        return self.bytes.encode(text)

    def encode_chat(self, messages):
        """All its turns."""
        return self.encode("".join(message.text for message in messages))

    def stream(self):
        """As bytes."""
        return self.bytes.stream()
