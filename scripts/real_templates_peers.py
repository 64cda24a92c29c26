"""Holds our renderer against others that were written by hand for one family each, token by token.

The package ``renderers`` writes the conversations of real_templates_talk.py for the families that real_templates.toml
lists as peers: the prompt, and what follows each turn. Where it gives a row up and begins another one, as after a
question that drops earlier thinking, there is nothing to compare. gpt-oss is held against ``openai-harmony``.

Exit status: 0 no token differs, or the packages can't be had here; 1 one does; 2 the packages can't be had, and
AGENTRL_CI=1 asks for them.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from real_templates import ROOT, dialects_of, load
from real_templates_fetch import Shelf, Unreachable
from real_templates_harmony import Harmony, write_vocabulary
from real_templates_harmony import differences as harmony_differences
from real_templates_play import Player
from real_templates_talk import CONVERSATIONS, Conversation, search

from agentrl.render.loading import load_tokenizer
from agentrl.toolenv.dialects import get_dialect

GPT_OSS = "gpt-oss-120b"
Pair = tuple[Sequence[int], Sequence[int]]
"""Our tokens and theirs."""


def pairs(player: Player, theirs: Any, conversation: Conversation, tools: Sequence[Any] | None) -> Iterator[Pair]:
    """Yield the prompts, and the rows up to where the assistant speaks again after each turn."""
    row = list(player.renderer.prompt(conversation.opening).token_ids)
    opening = [dict(message) for message in conversation.opening]
    yield row, _ids(theirs.render_ids(opening, tools=tools, add_generation_prompt=True))
    for turn, played in zip(player.turns(conversation), conversation.rounds, strict=True):
        answers = [dict(message) for message in played.answers]
        # Their stops are those of the models' generation_config.json.
        others = [end for end in theirs.get_stop_token_ids() if end != turn[-1]]
        added: list[int] = []
        for end in (*others, turn[-1]):
            ended = [*turn[:-1], end]
            segments = player.renderer.extend(ended, played.answers)
            added = [token for segment in segments for token in segment.token_ids]
            bridged = theirs.bridge_to_next_turn(list(row), ended, answers, tools=tools)
            if bridged is not None:
                yield [*row, *ended, *added], _ids(bridged)
        row += [*turn, *added]


def differences(name: str, tokenizer: Any, theirs: Any) -> Iterator[str]:
    """Yield a sentence for each place where the two differ, and one where nothing could be compared."""
    for dialect in dialects_of(tokenizer):
        spoken = get_dialect(dialect, [search])
        player = Player(tokenizer, spoken)
        compared = 0
        for conversation in CONVERSATIONS:
            for ours, other in pairs(player, theirs, conversation, list(spoken.template_tools) or None):
                compared += 1
                if list(ours) != list(other):
                    index = next((i for i, (a, b) in enumerate(zip(ours, other, strict=False)) if a != b), len(ours))
                    texts = [tokenizer.decode(list(ids)[max(0, index - 3) : index + 12]) for ids in (ours, other)]
                    yield f"{name}, {dialect}, {conversation.name}: ours {texts[0]!r}, theirs {texts[1]!r}"
        print(f"{name}: {dialect}, {compared} places compared")
        if compared == len(CONVERSATIONS) and spoken.native:
            yield f"{name}, {dialect}: nothing that follows a turn was compared"


def _ids(rendered: Any) -> list[int]:
    return list(getattr(rendered, "token_ids", rendered))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all peers; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = ROOT / "build" / "templates"
    parser.add_argument("--cache", type=Path, default=cache, help="where the packages are kept (default: %(default)s)")
    arguments = parser.parse_args(argv)
    rows, table = load()
    peers: Mapping[str, Mapping[str, Any]] = table["peers"]
    shelf = Shelf(folder=arguments.cache, packages=table["packages"], vocabularies=table["vocabularies"])
    try:
        peer: Any = import_module("renderers")
        shelf.fill([rows[name] for name in (*peers, GPT_OSS)], say=print)
        tokenizer, _ = shelf.dressed(load_tokenizer(shelf.paths[rows[GPT_OSS].vocabulary]), rows[GPT_OSS])
        with tempfile.TemporaryDirectory() as folder:
            write_vocabulary(Path(folder), shelf.paths[rows[GPT_OSS].vocabulary] / "tokenizer.json")
            harmony = Harmony()
    except (Unreachable, ModuleNotFoundError) as error:
        print(f"{error}: no template was compared")
        return 2 if os.environ.get("AGENTRL_CI") == "1" else 0
    wrong = list(harmony_differences(tokenizer, harmony))
    for name, settings in peers.items():
        tokenizer, _ = shelf.dressed(load_tokenizer(shelf.paths[rows[name].vocabulary]), rows[name])
        tokenizer.name_or_path = settings["model"]
        config = getattr(peer, settings["config"])
        theirs = peer.create_renderer(tokenizer, config(**settings.get("args", {})))
        tokenizer.init_kwargs["end_token_ids"] = theirs.get_stop_token_ids()
        wrong += differences(name, tokenizer, theirs)
    same = f"no token differs from renderers {peer.__version__}, and what is known from openai-harmony"
    print("\n".join(wrong) or same)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
