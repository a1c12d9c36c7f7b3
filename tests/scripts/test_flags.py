"""The command line: mistyped flags answered at once, and a help that begins with the program's own flags."""

import dataclasses
import subprocess
import sys
import time

import pytest

from frankenstein_hf.configuration.configuration_frankenstein import FrankensteinConfig
from frankenstein_hf.training import arguments, classification, embedding, language_modeling
from frankenstein_hf.training.arguments import BadInput, parse_arguments
from frankenstein_hf.training.help import help_text

from .conftest import SCRIPTS

PROGRAMS = {
    "run_mlm": ("ModelArguments", "DataArguments", "MaskingArguments", "ProgramArguments"),
    "run_clm": ("ModelArguments", "CausalDataArguments", "ProgramArguments"),
    "run_classification": ("ModelArguments", "LabelledDataArguments", "ProgramArguments"),
    "run_embedding": ("ModelArguments", "EmbeddingArguments", "EmbeddingProgramArguments"),
}


def classes(program):
    places = (arguments, language_modeling, classification, embedding)
    return [next(getattr(m, name) for m in places if hasattr(m, name)) for name in PROGRAMS[program]]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_quick_check_knows_exactly_the_flags_of_the_parser(program):
    import flags

    sources = flags.Sources(SCRIPTS / f"{program}.py")
    found = {name for cls in PROGRAMS[program] for name in sources.fields(cls) if not name.startswith("_")}
    assert found >= {field.name for cls in classes(program) for field in dataclasses.fields(cls) if field.init}
    assert __import__(program).main.__self__.class_names() == list(PROGRAMS[program])


@pytest.mark.parametrize(
    "argv",
    [
        ["--output_dir", "out", "--learning_rate=1e-3", "--no_do_eval"],
        ["--output-dir", "out", "--max_step", "3", "--layer_pattern", "--weird value"],
        ["--help"], ["--help_all"], ["-h"], ["--output_dir", "out", "--learning_rate", "-1"],
    ],
)  # fmt: skip
def test_what_the_parser_accepts_passes_the_quick_check(argv):
    import flags

    assert flags.problem_with(argv, str(SCRIPTS / "run_mlm.py"), *PROGRAMS["run_mlm"]) is None


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--max_stepz", "3"], "--max_stepz'; did you mean --max_steps?"),
        (["--hidden_size", "64"], "--config_overrides hidden_size=…"),
        (["--out\n\x1b[31m"], r"Unknown argument '--out\n\x1b[31m'"),
    ],
)
def test_both_checks_say_the_same(argv, message, tmp_path):
    import flags

    said = flags.problem_with(argv, str(SCRIPTS / "run_clm.py"), *PROGRAMS["run_clm"])
    assert message in said
    with pytest.raises(BadInput) as error:
        parse_arguments(classes("run_clm"), ["--output_dir", str(tmp_path), *argv])
    assert said == str(error.value)


def test_keys_of_a_file_are_checked_at_once_too(tmp_path):
    import flags

    file = tmp_path / "settings.yaml"
    file.write_text("output_dir: out\nlearning_rat: 1\n")
    said = flags.problem_with([str(file)], str(SCRIPTS / "run_clm.py"), *PROGRAMS["run_clm"])
    assert "unknown key 'learning_rat'" in said and "'learning_rate'" in said


def test_a_mistyped_flag_is_answered_before_torch_is_imported(tmp_path):
    code = (
        f"import sys, runpy; sys.argv = ['run_mlm.py', '--max_stepz', '3']; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        f"try: runpy.run_path({str(SCRIPTS / 'run_mlm.py')!r}, run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=SCRIPTS.parent, check=True)
    assert done.stdout.split() == ["2", "False", "False"] and "did you mean --max_steps?" in done.stderr
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_begins_with_the_programs_own_flags_and_names_real_defaults(program, capsys):
    own = help_text(classes(program))
    names = [line.split()[0] for line in own.splitlines() if line.startswith("  --")]
    assert names[0] == "--model_name_or_path" and "--output_dir" in names and "--max_steps" in names
    assert names.index("--train_file") < names.index("--output_dir") < names.index("--max_steps")
    config = FrankensteinConfig()
    for real in (f"Default: {','.join(config.mixer_names)}.", f"hidden_size={config.hidden_size}"):
        assert real in " ".join(own.split())
    assert "--ddp_backend" not in names and "Default: None" not in own
    every = help_text(classes(program), everything=True)
    fields = {field.name for cls in classes(program) for field in dataclasses.fields(cls) if field.init}
    assert {f"--{name}" for name in fields} == {line.split()[0] for line in every.splitlines() if line[:4] == "  --"}
    for flag in ("--help", "--help_all"):
        with pytest.raises(SystemExit) as end:
            parse_arguments(classes(program), [flag])
        assert end.value.code == 0
    assert "--ddp_backend" in capsys.readouterr().out
