"""The codes of findings, each with meaning and remedy. A code never changes its number or meaning.

``E``: the contract of ``reset`` and ``step``; ``S``: tasks and specification; ``R``: rewards; ``P``: leaked processes,
threads and files; ``T``: tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Code:
    """One kind of finding."""

    meaning: str
    """The fault, in words that hold for every finding of the kind."""
    advice: str
    """The remedy, in one sentence."""


CODES: Mapping[str, Code] = {
    "ARL-E000": Code(
        "something raised where nothing should",
        "Run the named call by hand and handle the case that raises.",
    ),
    "ARL-E001": Code(
        "the first observation is outside its space, or does not end with the user's message",
        "Return a tuple of messages from reset, the last of them the user's, each content a text without surrogates.",
    ),
    "ARL-E002": Code(
        "one task gave two different first observations",
        "Let the first observation depend on the task alone: no counter, clock or draw.",
    ),
    "ARL-E003": Code(
        "the gold player does not score the maximum",
        "Correct gold or reward, so that gold's turns end the episode with every part that counts for the agent at 1.",
    ),
    "ARL-E004": Code(
        "a turn with a tool call ended the episode before its turns were used up",
        "Let errors and results of tools be observations: only a text without a call ends an episode.",
    ),
    "ARL-E005": Code(
        "step raised on a text that a model may write",
        "Make parsing, tools and reward accept any text: raise ToolError in a tool, and score 0 in reward.",
    ),
    "ARL-E006": Code(
        "an episode was terminated and truncated at once, or its turn limit terminated it",
        "Terminate on a final answer and truncate on a limit, never both.",
    ),
    "ARL-E007": Code(
        "the same task, seed and actions gave different turns",
        "Draw from self.np_random only, forget in reset what the episode before left, and say no times or ids.",
    ),
    "ARL-E008": Code(
        "two instances played side by side disturb each other",
        "Keep state on the instance: nothing mutable in the class, the module or a tool that instances share.",
    ),
    "ARL-E009": Code(
        "a worthless answer scores",
        "Grade the last answer of the final text only, and compare it exactly.",
    ),
    "ARL-E010": Code(
        "an observation after the first is outside its space",
        "Return a tuple of messages from step, each with a known role and a text without surrogates as content.",
    ),
    "ARL-E011": Code(
        "an episode does not end: neither by a text without a call nor when its turns are used up",
        "Terminate on a text without a call, and truncate at max_turns.",
    ),
    "ARL-E012": Code(
        "a reward is not a finite float",
        "Return a float that is neither NaN nor infinite.",
    ),
    "ARL-E013": Code(
        "a tool can't be called in the environment's dialect",
        "List every tool before the dialect is asked for, or choose a dialect that can write the tool's arguments.",
    ),
    "ARL-E014": Code(
        "two splits share a task",
        "Make the splits of different problems, wording aside.",
    ),
    "ARL-E015": Code(
        "a task can't be found by its id",
        "Make find give the very task that carries the id, each time it is asked.",
    ),
    "ARL-E016": Code(
        "the record of the episode is not what was said",
        "Never change a message once it was returned, and say more through instructions, prompt or respond only.",
    ),
    "ARL-E017": Code(
        "step outside an episode does not raise EnvContractError",
        "Let step raise EnvContractError before the first reset and after the end.",
    ),
    "ARL-E018": Code(
        "two tools share a name, or a name is not one that every dialect can write",
        "Name each tool differently, by a letter and up to 63 letters, digits, underscores or hyphens.",
    ),
    "ARL-E019": Code(
        "a tool's description is empty",
        "Say in a sentence what the tool does: it is the function's docstring that the model reads.",
    ),
    "ARL-E020": Code(
        "a tool's parameters are no JSON schema of an object",
        "Give parameters as a JSON schema with type object, its properties, and those of them that are required.",
    ),
    "ARL-E021": Code(
        "a tool's answer has no bound",
        "Cut what a tool returns, so that one call can't fill the model's context.",
    ),
    "ARL-E022": Code(
        "a call of the gold player fails",
        "Correct gold, or the tool: what a perfect player does works.",
    ),
    "ARL-E023": Code(
        "a tool raises on every call",
        "Correct the tool, and let it raise ToolError, in words for the model, only where a call is wrong.",
    ),
    "ARL-E024": Code(
        "every call of a tool runs out of time",
        "Make the tool faster, or give it a longer timeout.",
    ),
    "ARL-S001": Code(
        "two tasks of a split share an id",
        "Give every task of a split an id of its own.",
    ),
    "ARL-S002": Code(
        "a task has an empty prompt or an empty id",
        "Leave such tasks out of the set.",
    ),
    "ARL-S003": Code(
        "prompts give their answer away",
        "Take the answer out of the prompt.",
    ),
    "ARL-S004": Code(
        "the specification can't be written as JSON and read back",
        "Register and make the environment with arguments that JSON can write.",
    ),
    "ARL-S005": Code(
        "the action space leaves out a text that a model may write",
        "Keep the action space that ToolEnv sets.",
    ),
    "ARL-S006": Code(
        "the same seed drew two different tasks",
        "Draw the task from self.np_random only, after super().reset(seed=seed).",
    ),
    "ARL-R001": Code(
        "an answer scores that only a tool has printed",
        "Grade the agent's final text, never a tool's output.",
    ),
    "ARL-R002": Code(
        "code that the agent wrote tampers with the grade",
        "Run the agent's code in a sandbox, and grade outside of it.",
    ),
    "ARL-R003": Code(
        "a number that is no answer scores: NaN, infinite or huge",
        "Refuse NaN, infinities and overlong numbers before comparing.",
    ),
    "ARL-R004": Code(
        "a long text takes long to parse or grade",
        "Limit what is graded, and use nothing that takes more than linear time.",
    ),
    "ARL-R005": Code(
        "one constant answer scores the maximum on every task checked",
        "Draw tasks whose answers differ, or correct the grader.",
    ),
    "ARL-R006": Code(
        "the grader runs an answer as code",
        "Read answers as data: no eval, exec or sympify on what the agent wrote.",
    ),
    "ARL-R007": Code(
        "a part of the reward is above 1",
        "Keep every part in 0 to 1 and set its worth in reward_weights.",
    ),
    "ARL-P001": Code(
        "a child process runs on after close",
        "End and wait for every process of the environment in close.",
    ),
    "ARL-P002": Code(
        "a thread runs on after close",
        "Stop and join every thread of the environment in close.",
    ),
    "ARL-P003": Code(
        "files or sockets stay open after close",
        "Close every file and socket of the environment in close.",
    ),
    "ARL-P004": Code(
        "close raised, on its first or second call",
        "Let close give back what is held and do nothing when there is nothing left.",
    ),
    "ARL-P005": Code(
        "an environment plays otherwise after close",
        "Let reset begin an episode after close as well: collectors close an environment between episodes.",
    ),
    "ARL-T001": Code(
        "the chat template refuses what the environment says, or can't be extended",
        "Use a tokenizer whose chat template takes these roles in this order, or change what the environment says.",
    ),
    "ARL-T002": Code(
        "a prompt does not begin with the tokens of the prompt and turn before it",
        "Never change what was said, and use a chat template that gives the same text each time.",
    ),
    "ARL-T003": Code(
        "what the record says the agent wrote is not what it sampled",
        "Record the action as it came: train on the agent's own tokens.",
    ),
    "ARL-T004": Code(
        "a turn written in tokens and read back makes other calls, or gold no longer scores the maximum",
        "Use a tokenizer that gives back the text it was given, or another dialect.",
    ),
    "ARL-T005": Code(
        "a control token spelled in a text becomes a control token",
        "Use a tokenizer that can split special tokens (split_special_tokens=True).",
    ),
}
