import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.data import ChatTemplate, TextError, load_chat_template, template_worker
from echelon.data.chat_template import CHATML, JinjaRenderer, RenderedChat

CHATML_JINJA = """\
{% for m in messages %}
{{ '<|im_start|>' + m.role + '\n' + m.get('content', '') + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}"""
GENERATION = """\
{% for m in messages %}
{%- if m.role == 'assistant' %}
{{- 'A: ' }}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{{ '\n' }}
{%- else %}
{{- m.role[0] | upper + ': ' + m.content + '\n' }}
{%- endif %}
{%- endfor %}"""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi é🙂"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]
NO_PREFIX = "does not render a conversation prefix by prefix (message 3)"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def render(source: str | None, messages: Sequence[Any] = TALK, *, find_turns: bool = True, **variables: str) -> Any:
    with ChatTemplate(origin="a template", source=source, variables=variables).open() as renderer:
        return renderer.render(messages, find_turns=find_turns)


def turns(rendered: RenderedChat) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.assistant]


@pytest.fixture(scope="module")
def chatml():
    with JinjaRenderer(CHATML_JINJA, {}, "chatml") as renderer:
        yield renderer


def test_chatml() -> None:
    rendered = render(None, TALK[1:4])
    assert rendered.text == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi é🙂<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    assert turns(rendered) == ["Hi é🙂<|im_end|>\n"]
    assert render(None, find_turns=False).assistant == []


@given(
    messages=st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]) | TEXTS.filter(bool), "content": TEXTS}),
        max_size=6,
    )
)
@settings(max_examples=40, deadline=None)
def test_the_built_in_chatml_is_the_jinja_template(chatml: JinjaRenderer, messages: list[dict[str, str]]) -> None:
    """Two independent ways to the turns too: written down, and found by rendering prefixes."""
    messages = [*messages, TALK[2]]
    with CHATML.open() as built_in:
        assert built_in.render(messages, find_turns=True) == chatml.render(messages, find_turns=True)


def test_a_template_may_mark_the_turns_itself() -> None:
    rendered = render(GENERATION, eos_token="</s>")
    assert rendered.text == "S: Be brief.\nU: Hello\nA: Hi é🙂</s>\nU: Bye\nA: So long</s>\n"
    assert turns(rendered) == ["Hi é🙂</s>", "So long</s>"]
    assert render(GENERATION, eos_token="</s>", find_turns=False) == (rendered.text, [])
    # In a macro and a variable too, where the text is not yet that of the conversation.
    macro = (
        "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{% set x = say(m) %}<{{ x | trim }}>{% endfor %}"
    )
    assert turns(render(macro, TALK[2:3])) == ["Hi é🙂"]


def test_templates_render_as_those_of_transformers() -> None:
    """The same options of Jinja, filters and functions, and the same marked turns."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    talk = [{**message, "extra": {"é": [1, "<&>"]}} for message in TALK]
    loop = "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.extra | tojson }}\n{% endfor %}"
    for source in (CHATML_JINJA, GENERATION, loop, "  {% if tools %}x{% endif %}\n  {{ messages[0].content }}\n"):
        (expected,), ((*spans,),) = utils.render_jinja_template(
            [talk], chat_template=source, return_assistant_tokens_mask=True, eos_token="</s>"
        )
        has_turns = source in (CHATML_JINJA, GENERATION)
        rendered = render(source, talk, find_turns=has_turns, eos_token="</s>")
        assert rendered.text == expected
        if source == GENERATION:
            assert rendered.assistant == spans


def test_tools_are_part_of_a_turn() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}: {% if m.tool_calls %}{{ m.tool_calls | tojson }}"
        "{% else %}{{ m.content }}{% endif %};{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [TALK[1], {"role": "assistant", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "4"}]
    assert turns(render(source, messages)) == ['[{"name": "f"}];']
    with pytest.raises(TextError, match=r"ChatML has no calls of tools \(message 2\); give data.chat_template"):
        render(None, messages)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "cannot be rendered (roles must alternate)"),
        ("{{ messages[0].nothing.more }}", "cannot be rendered ('dict object' has no attribute 'nothing')"),
        ("{{ strftime_now('%Y') }}", "cannot be rendered ('strftime_now' is undefined)"),
        ("{{ 1 / 0 }}", "cannot be rendered (division by zero)"),
        ("{% for m in messages %}{% if %}{% endfor %}", "cannot be rendered (line 1: Expected an expression"),
        ("{% include '/etc/passwd' %}", "cannot be rendered (no loader for this environment specified)"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered (access to attribute '__class__' of"),
        ("{% for i in range(1000000) %}{% endfor %}", "cannot be rendered (Range too big"),
        ("{{ messages.append(1) }}", "cannot be rendered ("),
        ("{{ '\\ud800' }}{{ messages[1].content }}", "renders a text that is not valid Unicode"),
        ("{{ messages[-1].content }}", NO_PREFIX),
        (
            "{% for m in messages %}{{ loop.length }}{% endfor %}",
            NO_PREFIX,
        ),
        (
            "{% for m in messages %}A:{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:<think>{% endif %}",
            NO_PREFIX,
        ),
        ("{% for m in messages %}{% endfor %}", "renders no turn of the assistant"),
        ("{% for m in messages %}x{% generation %}{% endgeneration %}{% endfor %}", "renders no turn of the assistant"),
        (
            "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
            "cuts a turn of the assistant, or nests {% generation %}",
        ),
        ("{% set x %}{% generation %}abc{% endgeneration %}{% endset %}{{ x[:-1] }}", "cuts a turn of the assistant"),
        ("{% set x %}{% generation %}abc{% endgeneration %}{% endset %}{{ x[1:] }}", "cuts a turn of the assistant"),
        ("{% generation %}a", "cannot be rendered (line 1: Unexpected end of template"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "needs too much recursion"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", ""),
    ],
)
def test_templates_that_cannot_be_used(source: str, says: str) -> None:
    error = template_worker.answer(lambda: template_worker.TemplateRenderer(source, {}).render(TALK, True))["error"]
    assert error.startswith(f"the chat template {says}")
    assert "\n" not in error


def test_an_error_of_a_template_names_it() -> None:
    for source in ("{% if %}", "{{ 1 / 0 }}"):
        with pytest.raises(TextError, match=r"^a template: the chat template cannot be rendered \("):
            render(source)


# -- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [[1, 2], [1, 2]] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_a_template_that_loops_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.chat_template.RENDER_SECONDS", 0.1)
    with pytest.raises(TextError, match=r"a template: the chat template needs more than 0.1 s of CPU time for one"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{% set ns = namespace(x='a' * 9999) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% for i in range(200) %}{{ 'a' * 500000 }}{% endfor %}",
    ],
)
def test_a_template_that_fills_the_memory_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.chat_template.RENDER_BYTES", 400 << 20)
    with pytest.raises(TextError, match=r"too much memory|more than 67108864 characters"):
        render(source)


def test_the_limit_of_time_is_for_each_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.chat_template.RENDER_SECONDS", 0.4)
    with JinjaRenderer(CHATML_JINJA, {}, "x") as renderer:
        longer = [{"role": "assistant", "content": "a" * 2000}] * 60
        for _ in range(30):
            renderer.render(longer, find_turns=True)
        renderer._process.kill()
        with pytest.raises(TextError, match=r"x: the process that renders the chat template ended \(exit status -9\)"):
            renderer.render(TALK, find_turns=True)


def test_a_conversation_that_cannot_be_rendered_does_not_end_the_process(chatml: JinjaRenderer) -> None:
    with pytest.raises(TextError):
        chatml.render([{"content": "x"}], find_turns=False)
    assert turns(chatml.render(TALK, find_turns=True)) == ["Hi é🙂<|im_end|>\n", "So long<|im_end|>\n"]


def test_the_process_ends_with_its_block() -> None:
    with JinjaRenderer(CHATML_JINJA, {}, "x") as renderer:
        assert renderer._process.poll() is None
    assert renderer._process.returncode == -9


def test_a_signal_that_this_process_ignores_still_ends_the_template() -> None:
    """An ignored signal is inherited by processes that are started, and would leave a loop without an end."""
    code = """if True:
        import signal
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
        from echelon.data import chat_template
        chat_template.RENDER_SECONDS = 0.2
        loop = "{% for i in range(99999) %}{% for i in range(999) %}{% endfor %}{% endfor %}"
        try:
            with chat_template.JinjaRenderer(loop, {}, "x") as renderer:
                renderer.render([], find_turns=False)
        except ValueError as error:
            print(error)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("x: the chat template needs more than 0.2 s of CPU time")


# -- where a template comes from --------------------------------------------------------------------------------------


def test_the_template_of_a_tokenizer_directory(tmp_path: Path) -> None:
    tokenizer, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    tokenizer.write_text("{}")
    assert load_chat_template("", tmp_path) is CHATML
    assert load_chat_template("", "bytes") is CHATML
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "pad_token": None, "x": "y"}
    config.write_text(json.dumps({**tokens, "chat_template": "one"}))
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    for path in (tmp_path, tokenizer):
        found = load_chat_template("", path)
        assert found == ChatTemplate(origin=str(config), source="one", variables=variables)
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    config.write_text(json.dumps({"chat_template": several}))
    assert load_chat_template("", tmp_path).source == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert load_chat_template("", tmp_path).source == "three"
    (tmp_path / "mine.jinja").write_text("four")
    config.write_text(json.dumps(tokens))
    mine = load_chat_template(str(tmp_path / "mine.jinja"), tmp_path)
    assert (mine.source, mine.variables) == ("four", variables)
    assert load_chat_template("chatml", tmp_path) is CHATML


@pytest.mark.parametrize("content", ["{", "[" * 200, '{"chat_template": 5}', '{"chat_template": [{"name": "x"}]}'])
def test_a_broken_directory_is_not_taken_for_one_without_a_template(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TextError, match=r"tokenizer_config.json .*(data.chat_template|give another)"):
        load_chat_template("", tmp_path)


def test_files_that_are_no_template(tmp_path: Path) -> None:
    (tmp_path / "long.jinja").write_bytes(b"x" * (1 << 21))
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    for name, says in (("long", "is too large"), ("bytes", "is not UTF-8"), ("none", "no such file")):
        with pytest.raises(TextError, match=f"the chat template .*{name}.jinja .*{says}.*; check data.chat_template"):
            load_chat_template(str(tmp_path / f"{name}.jinja"), "bytes")


def test_keys_of_templates() -> None:
    keys = [CHATML.key, ChatTemplate(origin="a", source="x").key, ChatTemplate(origin="a", source="y").key]
    assert len(set(keys)) == 3
    assert ChatTemplate(origin="b", source="x").key == keys[1]
    assert keys[0] == "chatml"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(TextError, match=r'the chat template needs the jinja2 package; run pip install "echelon\[data'):
        render("x")
    assert turns(render(None)) == ["Hi é🙂<|im_end|>\n", "So long<|im_end|>\n"]
