"""A tokenizer for engines without a model (fake or simulated runner): one token is one byte.

Ids past 255 show as the character of that code point, so that whatever a fake runner samples can be read.
"""

from collections.abc import Sequence

END_OF_TURN = 0


class ByteTokenizer:
    """Implements `schedtop.control.http.text.Tokenizer` without any files."""

    def encode(self, text: str) -> list[int]:
        """The text's UTF-8 bytes."""
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        """The byte itself, or the code point's bytes."""
        if 0 <= token_id < 256:
            return bytes([token_id])
        return chr(token_id).encode(errors="replace") if 0 <= token_id <= 0x10FFFF else b""

    def is_special(self, token_id: int) -> bool:
        """The zero byte ends a turn."""
        return token_id == END_OF_TURN

    def apply_chat_template(
        self, messages: Sequence[dict[str, object]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """One line per message: `role: content`."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + ("assistant: " if add_generation_prompt else ""))
