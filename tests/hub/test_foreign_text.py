"""Text from outside stays text, whatever it contains: in cards, their snippets and metadata, and in every program.

The property: a card made with a hostile name has the same structure as one made with a harmless name. The structure is
what a CommonMark parser with tables finds, the syntax trees of the snippets, and the kinds of values in the metadata.
"""

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.hub.cards import hub_name, is_repo_id, parse_card, render
from frankenstein_hf.hub.foreign import Markdown, code, fenced, html_text, markdown, one_line, python
from frankenstein_hf.modeling import implementations
from frankenstein_hf.modeling.mixers.dense.standard import StandardAttention
from frankenstein_hf.training.results import Results
from tests.scripts.conftest import TINY, _own_caches  # noqa: F401  (a fixture)
from tests.tiny import tiny_model

HARMLESS = "plainname"
HOSTILE = {
    "jinja": "a{% endraw %}{{ cycler.__init__.__globals__.os.system('touch pwned') }}{% raw %}",
    "python": 'x"); import os; os.system("touch pwned"); ("',
    "triple quotes": "'''\"\"\"\\",
    "backslashes": '\\\\\\" \\n \\x41',
    "pipes": "a|b||c \\| d",
    "lines": "a\n\n# Title\n\n- item\r\n| x | y |\n|---|---|\n| 1 | 2 |",
    "front matter": "a\n---\nlicense: evil\n---\nb: c",
    "yaml": "- [a: {b, *c, &d, !!python/object/apply:os.system ['touch pwned']",
    "fence": "a\n```\nimport os\n```\n~~~\nb",
    "backticks": "`a` ``b`` ```",
    "html": "<script>alert(1)</script><img src=x onerror=y> --> <!-- </code> </details>",
    "links": "[a](http://b.example) ![c](d) <http://e.example> www.f.example http://g.example me@h.example",
    "emphasis": "*a* **b** _c_ __d__ ~~e~~ $f$ $$g$$",
    "entities": "&lt;b&gt; &amp; &#96; &NewLine;",
    "invisible": "a\x00\x1b[31m\u2028\u2029\x85\u202eb\ufeff\x7f",
    "undecodable": "a\udcff\udc80",
    "sections": "a\n## Results\n\n## Training\nb",
    "leading": "# > - + 1. = --- ",
    "format": "{0} %s %(name)s $HOME ${PATH} {name!r}",
    "glob": "a[1]*?{b,c}::d~",
}


def parser() -> MarkdownIt:
    return MarkdownIt("gfm-like", {"html": True, "linkify": False})


def structure(text: str) -> list[str]:
    """Every structural element of a text in Markdown, without the words."""
    found = []
    for token in parser().parse(text):
        inline = [
            child.type for child in token.children or () if child.type not in ("text", "softbreak", "text_special")
        ]
        found.append(f"{token.type} {token.info} {' '.join(inline)}")
        if token.type == "html_block":
            found[-1] += re.sub(r"\w{12}", "digest", token.content)  # our own marks
        if token.type == "fence" and token.info == "python":
            found[-1] += ast.dump(_without_strings(ast.parse(token.content)))
    return found


def _without_strings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = "…"
    return tree


def words(text: str) -> str:
    """What a reader sees."""
    return "".join(
        child.content
        for token in parser().parse(text)
        for child in token.children or ()
        if child.type in ("text", "code_inline", "text_special")
    )


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("make", [markdown, code], ids=["markdown", "code"])
def test_escaped_text_is_seen_as_it_was_and_makes_no_structure(make, case):
    name = HOSTILE[case]
    for frame in ("before {} after", "| a | b |\n|---|---|\n| {} | c |", "- {}: c", "[{}](https://a.example)"):
        shown = frame.replace("{}", make(name))
        expected = structure(frame.replace("{}", make(HARMLESS)))
        kinds = [re.sub(r"code_inline|html_inline", "", line) for line in structure(shown)]
        assert [line.split() for line in kinds] == [
            re.sub(r"code_inline|html_inline", "", line).split() for line in expected
        ]
    assert make is code or not re.search(r"https?://|www\.\w", make(name)), "the Hub makes links of bare addresses"
    assert " ".join(one_line(name).split()) in " ".join(words(f"before {make(name)} after").split())


@pytest.mark.parametrize("case", HOSTILE)
def test_other_places_keep_text_in_its_place(case):
    name = HOSTILE[case]
    assert ast.literal_eval(python(name)) == name and "\n" not in python(name)
    (block,) = parser().parse(fenced(name, "text"))
    assert block.type == "fence" and block.info == "text"
    assert block.content == "".join(f"{one_line(line)}\n" for line in name.splitlines())
    cell = html_text(name)
    assert not set(cell) & set("<>|`*_[]\\\n$") and structure(f"<i>{cell}</i>") == structure("<i>a</i>")
    assert one_line(name).isprintable() or case == "invisible"
    one_line(name).encode()


def rendered(name: str, folder: Path, **repo: str) -> str:
    """A card in which everything that can come from outside is `name`."""
    place = folder / (name.replace("/", "∕").replace("\0", "")[:80] or "x")
    place.mkdir()
    spec = dataclasses.replace(MIXERS.get("standard"), name=name, summary=name, reference=name)
    model = tiny_model("standard")
    vars(model.config)["hidden_act"] = name
    vars(model.config)["mixer_spec_for"] = lambda layer_idx: spec
    model.config._name_or_path = name
    implementations.register_implementation(spec, StandardAttention)
    data = Markdown(code(name))
    metrics = {
        "before": {name: 1.0}, "after": {name: 1.0, "loss": 2.0}, "none": {}, "recipe": {"optimizer": name, name: 1}
    }  # fmt: skip
    results = Results(
        metrics, "none", name, "text-generation", name, name, "loss.png", data, data, fenced(name, "text"), "mit"
    )
    try:
        render(model, place, results=results, **repo)
        first = (place / "README.md").read_text()
        render(model, place, **repo)  # again: the sections are taken over
        assert (place / "README.md").read_text() == first
    finally:
        implementations._REGISTERED.pop(implementations._key(spec))
    return first


@pytest.mark.parametrize("case", HOSTILE)
def test_a_card_has_the_same_structure_with_every_name(case, tmp_path):
    harmless, hostile = rendered(HARMLESS, tmp_path), rendered(HOSTILE[case], tmp_path)
    assert skeleton(hostile) == skeleton(harmless)
    one, other = (yaml.safe_load(card.split("---\n")[1]) for card in (harmless, hostile))
    assert set(other) == set(one) or set(one) - set(other) <= {"datasets", "base_model"}
    assert other["license"] == "mit" and isinstance(other["model-index"][0]["name"], str)
    assert parse_card(hostile).metadata == other


def skeleton(card: str) -> list[list[str]]:
    """`structure` of a card, in which names may be code, links or HTML around code."""
    lines = structure(parse_card(card).body)
    return [re.sub(r"\b(code_inline|html_inline|link_open|link_close)\b", "", line).split() for line in lines]


@pytest.mark.parametrize("case", HOSTILE)
def test_names_in_examples_are_names_the_hub_allows(case, tmp_path):
    name = HOSTILE[case]
    for given in (name, f"me/{name}", None):
        assert is_repo_id(hub_name(tmp_path / name.replace("\0", ""), given))
    card = rendered(name, tmp_path, repo_id=name)
    assert re.findall(r'from_pretrained\((".*?")', card) == ['"YOUR-NAME/MODEL"'] or is_repo_id(name)


# ---------------------------------------------------------------------- every program

WORST = (
    "a{% endraw %}{{ cycler.__init__.__globals__.os.system('touch pwned') }}{% raw %}|*[1]\"); import os; "
    "os.system('touch pwned'); (\"\\\n## Results\n---\n```\n<b>$x$ %s {0} &lt; \x1b[31m\u2028\udcff"
)


@pytest.mark.parametrize("program", ["run_mlm", "run_clm", "run_classification", "run_embedding"])
def test_every_program_takes_hostile_names_of_files_and_folders(program, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cards = {}
    for name in (HARMLESS, WORST):
        lines = [
            {"text": f"row {i} of {name} and more words, so that a block is filled" * 2, "label": f"{name} {i % 2}"}
            for i in range(40)
        ]
        if program == "run_embedding":
            lines = [{"anchor": f"row {i} {name}", "positive": f"text {i} {name}"} for i in range(40)]
        file, folder = Path(f"{name}.jsonl"), Path(f"{name} out".replace("\udcff", ""))
        file.write_text("\n".join(map(json.dumps, lines)).replace("\\udcff", "?"))
        values = {"output_dir": folder, "train_file": file, **TINY, "max_steps": 1, "save_steps": 9, "vocab_size": 400}
        values |= {} if program in ("run_embedding", "run_classification") else {"text_column": "text"}
        __import__(program).main([part for key, value in values.items() for part in (f"--{key}", str(value))])
        assert re.fullmatch(r"[^\x00-\x09\x0b-\x1f\u2028\ud800-\udfff]*", capsys.readouterr().out)
        json.loads((folder / "metrics.json").read_text())
        cards[name] = (folder / "README.md").read_text()
        assert not list(tmp_path.rglob("pwned"))
    one, other = (  # but for what the models write
        skeleton(re.sub(r"\n ```text\n.*?\n ```\n.*", "\n", card, flags=re.DOTALL)) for card in cards.values()
    )
    assert one == other


def test_nothing_is_executed_by_a_file_with_code_for_a_name(tmp_path, monkeypatch):
    """The case that was found: the name of the training file became part of a Jinja template."""
    name = "a{% endraw %}{{ 6 * 7 }}{% raw %}.jsonl"
    file = tmp_path / name
    file.write_text("\n".join(json.dumps({"anchor": f"row {i}", "positive": f"text {i}"}) for i in range(20)))
    values = {"output_dir": tmp_path / "out", "train_file": file, **TINY, "max_steps": 1}
    __import__("run_embedding").main([part for key, value in values.items() for part in (f"--{key}", str(value))])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "## Results" in card and "{{ 6 * 7 }}" in card.replace("&#123;", "{").replace("&#125;", "}")


def test_settings_and_labels_that_look_like_code_stay_text(tmp_path):
    """YAML is read as data: tags that make objects are refused."""
    from frankenstein_hf.training.arguments import BadInput, ModelArguments, parse_arguments

    file = tmp_path / "settings.yaml"
    file.write_text("layer_pattern: !!python/object/apply:os.system ['touch pwned']\n")
    with pytest.raises(BadInput, match="not valid YAML"):
        parse_arguments((ModelArguments,), [str(file)])
    assert fhf.FrankensteinConfig(id2label={0: HOSTILE["jinja"]}).id2label[0] == HOSTILE["jinja"]
