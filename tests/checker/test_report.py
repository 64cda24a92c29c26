"""How a check is asked for, and what its report looks like."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.checker import CODES, Finding, Report, check_env
from agentrl.cli import main
from agentrl.errors import ConfigError, InfrastructureError, UnknownNameError
from agentrl.tools import ToolContext

from .broken_contract import ErrorsEnd, GoldWrong, Shares
from .broken_rewards import ScoresAlways
from .conftest import Register
from .good import Good, Memory


def test_a_report_reads_as_lines() -> None:
    report = Report(findings=(Finding(code="ARL-E003", message="Gold lost."),), skipped=("the rest.",))
    assert str(report) == f"ARL-E003  Gold lost. {CODES['ARL-E003'].advice}\nnot checked: the rest."
    assert json.loads(json.dumps(report.row())) == {
        "ok": False,
        "findings": [{"code": "ARL-E003", "message": "Gold lost.", "advice": CODES["ARL-E003"].advice}],
        "skipped": ["the rest."],
    }


def test_codes_are_sentences_and_keep_their_numbers() -> None:
    assert all(code.meaning and code.advice[0].isupper() and code.advice.endswith(".") for code in CODES.values())
    count = {"E": 22, "S": 6, "R": 7, "P": 5, "T": 5}
    first = {"E": 0, "S": 1, "R": 1, "P": 1, "T": 1}
    assert [*CODES] == [f"ARL-{kind}{n + first[kind]:03}" for kind, number in count.items() for n in range(number)]


def test_a_given_instance_is_checked_as_well(register: Register) -> None:
    env = agentrl.make(register(Shares))
    assert {finding.code for finding in check_env(env).findings} == {"ARL-E008"}
    assert check_env(Shares()).ok  # no second instance to compare with: said in Report.skipped


def test_an_infrastructure_fault_is_no_finding() -> None:
    class Down(Memory):
        def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
            raise InfrastructureError("the daemon is gone")

    env = Good()
    env.tools = (Down(),)
    with pytest.raises(InfrastructureError, match="daemon"):
        check_env(env)


def test_the_same_finding_is_reported_once() -> None:
    findings = check_env(ScoresAlways(), tasks=3).findings
    assert len(findings) == len(set(findings))


def test_many_findings_of_one_kind_are_counted(register: Register) -> None:
    findings = check_env(register(ErrorsEnd)).findings
    assert [finding.code for finding in findings] == ["ARL-E004"] * 3
    assert findings[-1].message.endswith(" more like it.)")


def test_wrong_arguments_are_refused(register: Register) -> None:
    with pytest.raises(ConfigError, match="tasks is 0"):
        check_env(Good(), tasks=0)
    with pytest.raises(UnknownNameError):
        check_env("agentrl/Arithmetc-v0")
    with pytest.raises(UnknownNameError, match="dialect"):
        check_env(register(Good), dialect="morse")
    with pytest.raises(ConfigError, match="dialect already"):
        check_env(Good(), dialect="fence")


def test_every_check_is_announced(register: Register) -> None:
    said: list[str] = []
    check_env(register(Good), dialect="fence", say=said.append)
    assert len(said) == len(set(said)) > 15
    assert {"first observation", "turns", "leaks", "tokens"} <= set(said)


def test_what_a_probe_changes_is_restored(register: Register) -> None:
    import builtins

    from .broken_rewards import RunsBesideTheGrader

    before: dict[str, Any] = dict(vars(builtins))
    assert not check_env(register(RunsBesideTheGrader)).ok
    assert vars(builtins) == before


def test_the_command_says_what_was_seen_and_what_to_do(
    register: Register, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, good = register(GoldWrong), register(Good)
    assert main(["check-env", broken]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ARL-E003  Gold scored 0 of 1") for line in lines)
    assert main(["check-env", broken, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [sorted(finding) for finding in found["findings"]] == [["advice", "code", "message"]] * 3
    tokenizer.save_pretrained(tmp_path)
    assert main(["check-env", good, "--tokenizer", str(tmp_path), "--dialect", "fence", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "findings": [], "skipped": []}
    assert main(["check-env", good, "--tokenizer", str(tmp_path / "none")]) == 2
    assert main(["check-env", good, "--dialect", "morse"]) == 2
    assert "morse" in capsys.readouterr().err
