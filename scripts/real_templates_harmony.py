"""Holds our writing of gpt-oss's conversations, which is its chat template's, against OpenAI's own library for them.

The two disagree, and docs/templates.md says in what: that, and nothing else, may differ here.
"""

import base64
import copy
import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from real_templates_play import Player
from real_templates_talk import CONVERSATIONS, Conversation, search
from transformers.convert_slow_tokenizer import bytes_to_unicode

from agentrl.toolenv.dialects import get_dialect


def write_vocabulary(folder: Path, tokenizer_json: Path) -> None:
    """Write the vocabulary where tiktoken looks for it, so that the library needs no network."""
    vocabulary = json.loads(tokenizer_json.read_text(encoding="utf-8"))["model"]["vocab"]
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    ranked = sorted(vocabulary.items(), key=lambda item: item[1])
    tokens = ((bytes(byte_of[letter] for letter in spelled), rank) for spelled, rank in ranked)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in tokens)
    (folder / "o200k_base.tiktoken").write_text("".join(lines), encoding="ascii")
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)


class Harmony:
    """Writes messages with ``openai-harmony``, which checks the vocabulary's SHA-256."""

    def __init__(self) -> None:
        self._library: Any = import_module("openai_harmony")
        name = self._library.HarmonyEncodingName.HARMONY_GPT_OSS
        self._encoding: Any = self._library.load_harmony_encoding(name)

    def prompt(self, conversation: Conversation, *, tools: bool) -> list[int]:
        """Write the first prompt."""
        message_from, role = self._library.Message.from_role_and_content, self._library.Role
        effort = self._library.ReasoningEffort.MEDIUM
        system = self._library.SystemContent.new().with_conversation_start_date("2025-01-01")
        content = self._library.DeveloperContent.new()
        if tools:
            tool = self._library.ToolDescription.new(
                search.name, search.description, parameters=dict(search.parameters)
            )
            content = content.with_function_tools([tool])
        opening = conversation.opening
        instructions = "".join(message["content"] for message in opening if message["role"] == "system")
        content = content.with_instructions(instructions) if instructions else content
        developer = [message_from(role.DEVELOPER, content)] if instructions or tools else []
        questions = [message_from(role.USER, message["content"]) for message in opening if message["role"] == "user"]
        messages = [message_from(role.SYSTEM, system.with_reasoning_effort(effort)), *developer, *questions]
        whole = self._library.Conversation.from_messages(messages)
        return list(self._encoding.render_conversation_for_completion(whole, role.ASSISTANT))

    def call(self, arguments: str) -> list[int]:
        """Write a call of the tool."""
        message = self._library.Message.from_role_and_content(self._library.Role.ASSISTANT, arguments)
        return self._write(message.with_recipient("functions.search").with_content_type("json"))

    def result(self, content: str) -> list[int]:
        """Write a tool's result, and what opens the next turn."""
        author = self._library.Author.new(self._library.Role.TOOL, "functions.search")
        message = self._library.Message.from_author_and_content(author, content).with_recipient("assistant")
        return [*self._write(message), *self._encoding.encode("<|start|>assistant", allowed_special="all")]

    def _write(self, message: Any) -> list[int]:
        return list(self._encoding.render(message.with_channel("commentary")))


def differences(tokenizer: Any, theirs: Harmony) -> Iterator[str]:
    """Yield a sentence for each place where more differs than is known."""
    spoken = get_dialect("native-harmony", [search])
    native, bare = Player(tokenizer, spoken), Player(tokenizer, get_dialect("fence", [search]))
    other = copy.deepcopy(tokenizer)
    other.chat_template = other.chat_template.replace("message.content|tojson", "message.content")
    served = Player(other, spoken)
    for conversation in CONVERSATIONS:
        for player, tools in ((native, True), (bare, False)):
            ours = player.renderer.prompt(conversation.opening).token_ids
            for text, wanted in player.differing(ours, theirs.prompt(conversation, tools=tools)):
                # A default of an optional parameter has a comma behind it, and instructions without tools a blank line.
                if wanted != (text.replace(",\n", "\n") if tools else text.removesuffix("\n\n")):
                    yield f"gpt-oss, {conversation.name}: ours {text!r}, theirs {wanted!r}"
        calls = [call for played in conversation.rounds for call in zip(played.calls, played.answers, strict=False)]
        for (name, arguments), answer in calls:
            text = spoken.render(name, arguments)
            turn = native.renderer.turn(text, answered_by="tool", marks=spoken.marks)
            if turn != theirs.call(text.partition("<|message|>")[2])[2:]:
                yield f"gpt-oss, {conversation.name}: a call differs"
            # The template writes a result as a JSON string, and the library as it is.
            quoted = json.dumps(answer["content"], ensure_ascii=False)
            for player, content in ((native, quoted), (served, answer["content"])):
                segments = player.renderer.extend(turn, [answer])
                if [token for segment in segments for token in segment.token_ids] != theirs.result(content):
                    yield f"gpt-oss, {conversation.name}: the result {content!r} differs"
