"""Chat templates: the strings that transformers makes, and bounds no template can break out of."""

# ruff: noqa: E501 - templates are single lines in the files that carry them

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagetide_models import ChatTemplateError, ModelFormatError, open_model
from pagetide_models.chat_template import ChatTemplate

jinja2 = pytest.importorskip("jinja2", reason="needs the jinja2 package")

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße & <b>"},
    {"role": "assistant", "content": "  Hi.\n"},
    {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
]
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"x": [1, 2.5, None, "é"]}}}
]


def render(source: str, messages: Any = MESSAGES, generate: bool = True, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        messages, generate, variables
    )


TEMPLATES = {
    "chatml": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nDefault<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + "
    "'\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama 2": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + "
    "system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}"
    "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "namespace, macro, tojson, loop controls": """\
{%- macro show(message, prefix='> ') -%}
    {{ prefix ~ message.role | upper ~ ': ' ~ (message.content | trim) }}
{%- endmacro %}
{%- set ns = namespace(count=0, last='') %}
{%- for message in messages if message.role != 'system' %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- set ns.last = message.content %}
    {%- if message.role == 'assistant' %}{% continue %}{% endif %}
    {{- show(message) }} {{ loop.index }}/{{ loop.length }}
{% endfor %}
{{ ns.count }} {{ ns.last | tojson }} {{ messages | length }}
{%- if tools is not none %}
{{ tools | tojson(indent=2) }}{% for t in tools %}{{ t.function.name }}{% endfor %}
{%- endif %}
{% for role, group in [('user', 1), ('system', 2)] %}{{ role }}={{ group }};{% endfor %}
{{ messages[::-1][0].content.split(' ')[0] }} {{ 'x' * 3 }} {{ 7 // 2 }} {{ 2 ** 5 }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}
{{ {'a': 1, 'b': [1, 2]} | dictsort }} {{ 'a,b'.split(',') | last }} {{ missing | default('none') }}
{{ 'a-b' | replace('-', '+') }} {{ '%s and %d' % ('x', 3) }} {{ '{} {}'.format('y', 4) }}
{% generation %}answer{% endgeneration %}
{{ messages[0].get('missing', 'fallback') }} {{ 'ab' in 'cabd' }} {{ 3 is odd }} {{ none is none }}
{{ '-'.join(['p', 'q']) }} {{ ('b', 'a') | sort | first }} {{ [3, 1] | max }} {{ [1, 2] | sum }}
{{ 'line\nline' | indent(2) }} {{ '3' | int + 1 }} {{ 2.567 | round(1) }} {{ range(3) | list }}
{% set captured %}<{{ bos_token }}>{% endset %}{{ captured }}{% filter upper %}up{% endfilter %}
""",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generate", [False, True])
def test_the_strings_are_those_of_transformers(name: str, generate: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="the oracle")
    (expected,), _ = utils.render_jinja_template(
        conversations=[MESSAGES],
        tools=TOOLS,
        chat_template=TEMPLATES[name],
        add_generation_prompt=generate,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert render(TEMPLATES[name], generate=generate, tools=TOOLS) == expected


@pytest.mark.model
def test_the_demo_models_own_template(demo_gguf: Path) -> None:
    tokenizer = open_model(demo_gguf).load_tokenizer()
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        tokenizer.apply_chat_template(
            [{"role": "system", "content": "S"}], add_generation_prompt=False
        )
        == "<|im_start|>system\nS<|im_end|>\n"
    )


def test_recursive_loops_work_and_are_counted() -> None:
    tree = [{"name": "a", "below": [{"name": "b", "below": []}]}]
    source = "{% for n in t recursive %}{{ n.name }}({{ loop(n.below) }}){% endfor %}"
    assert render(source, t=tree) == "a(b())"


def test_large_conversations_are_rendered() -> None:
    messages = [{"role": "user", "content": "word " * 2000} for _ in range(200)]
    text = render(TEMPLATES["chatml"], messages)
    assert len(text) > 200 * 10_000


def test_message_values_are_never_template_code() -> None:
    assert "{{ 7 * 7 }}" in render(TEMPLATES["chatml"])


HOSTILE = {
    "range nested": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "text in loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    + "x" * 1000
    + "{% endfor %}{% endfor %}",
    "string times number": "{{ 'a' * 10000000000 }}",
    "number times string": "{{ 10000000000 * 'a' }}",
    "list times number": "{{ ([0] * 10000000000) | length }}",
    "doubling": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
    "{% endfor %}{{ ns.s }}",
    "doubling by concatenation": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}",
    "doubling by join": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}{{ ns.s | length }}",
    "doubling by the method join": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set ns.s = ''.join([ns.s, ns.s]) %}{% endfor %}{{ ns.s | length }}",
    "doubling by capture": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}{{ ns.s | length }}",
    "doubling by format": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}{{ ns.s | length }}",
    "doubling by replace": "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s.replace('a', 'aaaa') %}{% endfor %}{{ ns.s | length }}",
    "doubling by the filter replace": "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s | replace('a', 'aaaa') %}{% endfor %}{{ ns.s | length }}",
    "shared lists": "{% set ns = namespace(s=['x']) %}{% for i in range(60) %}"
    "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "shared lists as json": "{% set ns = namespace(s=['x']) %}{% for i in range(60) %}"
    "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | tojson }}",
    "shared tuples compared": "{% set ns = namespace(s=('x',), t=('x',)) %}{% for i in range(60) %}"
    "{% set ns.s = (ns.s, ns.s) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ ns.s == ns.t }}",
    "shared dicts": "{% set ns = namespace(s={'a': 1}) %}{% for i in range(60) %}"
    "{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}{{ ns.s }}",
    "shared dicts by call": "{% set ns = namespace(s={'a': 1}) %}{% for i in range(60) %}"
    "{% set ns.s = dict(a=ns.s, b=ns.s) %}{% endfor %}{{ ns.s }}",
    "shared namespaces": "{% set ns = namespace(s=1) %}{% for i in range(60) %}"
    "{% set ns.s = namespace(a=ns.s, b=ns.s) %}{% endfor %}{{ ns.s ~ [ns.s] * 999999999 }}",
    "center": "{{ 'a'.center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10000000000) }}",
    "translate": "{{ 'aaaa'.translate({97: 'a' * 1000}) }}",
    "format width": "{{ '{:10000000000}'.format('a') }}",
    "nested format width": "{{ '{:{}}'.format('a', 10000000000) }}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10000000000, 1) }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "power of power": "{{ ((9 ** 999) ** 999) ** 999 }}",
    "squaring": "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}"
    "{% endfor %}{{ ns.n }}",
    "macro calls itself": "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "macro tree": "{% macro m(n) %}{% if n > 0 %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "block tree": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "map of map": "{{ range(99999) | map('string') | map('upper') | list | map('length') | list * 99 }}",
    "sum of lists": "{{ [[0] * 9] * 999 | sum(start=[]) }}",
    "list of a string many times": "{% for i in range(99999) %}{% set x = ('a' * 99999) | list %}{% endfor %}",
    "slices": "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "compare in a loop": "{% set x = 'a' * 999999 %}{% set y = 'a' * 999999 %}{% for i in range(99999) %}"
    "{% for i in range(99999) %}{{ x == y }}{% endfor %}{% endfor %}",
    "indent": "{{ '\\n' * 99999 | indent(99999) }}",
    "json indent": "{{ [[[[1]]]] | tojson(indent=9999999999) }}",
    "round": "{{ 1.5 | round(999999999, 'floor') }}",
    "strftime": "{{ strftime_now('%999999999d') }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "center filter": "{{ 'a' | center(10000000000) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "batch filter": "{{ range(99999) | batch(1, 'x') | list }}",
    "fromkeys": "{% for i in range(99999) %}{% set x = {}.fromkeys(range(99999)) %}{% endfor %}",
    "deep parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "deep unary": "{{ " + "-" * 50_000 + "1 }}",
    "long sum": "{{ " + "1+" * 50_000 + "1 }}",
    "deep lists": "{{ " + "[" * 50_000 + "]" * 50_000 + " }}",
    "deep ifs": "{% if 1 %}" * 10_000 + "{% endif %}" * 10_000,
    "deep fors": "{% for a in [1] %}" * 100 + "{% endfor %}" * 100,
    "too long": "x" * 300_000,
    "attribute": "{{ messages.__class__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ namespace.__init__.__globals__ }}{{ raise_exception.__globals__['re'] }}",
    "format escape": "{{ '{0.__class__.__mro__}'.format('') }}",
    "change messages": "{{ messages.append(1) }}",
    "attr filter": "{{ '' | attr('__class__') | attr('mro') }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "syntax": "{% for %}",
    "unknown filter": "{{ 1 | nothing }}",
    "unknown test": "{{ 1 is nothing }}",
    "unknown call": "{{ nothing() }}",
    "refuses": "{{ raise_exception('no system role') }}",
    "division": "{{ 1 // 0 }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_an_error_soon_and_cheaply(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with pytest.raises(ChatTemplateError):
        render(HOSTILE[name])
    # Not a measure of speed: without the bound these run for hours.
    assert time.process_time() - started < 30
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB on Linux
    assert grown < 256 * 1024


def test_time_is_bounded_where_work_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetide_models.chat_template.MAX_SECONDS", 0.05)
    monkeypatch.setattr("pagetide_models.chat_template.BASE_WORK", 10**15)
    with pytest.raises(ChatTemplateError, match=r"more than 0\.05 seconds"):
        render(HOSTILE["range nested"])


def test_a_namespace_may_hold_itself() -> None:
    assert render("{% set ns = namespace() %}{% set ns.me = ns %}{{ [ns.me] }}") == "[<Namespace>]"


def test_budgets_of_two_renderings_are_apart() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}ok", {})
    assert [template.render([], False, {}) for _ in range(30)] == ["ok"] * 30


@pytest.mark.parametrize(
    "messages",
    [["text"], [{"content": "no role"}], [{"role": 5, "content": ""}], [{"role": "user", "content": {1}}],
     [{"role": "user", "content": object()}]],
)  # fmt: skip
def test_messages_of_the_wrong_kind(messages: Any) -> None:
    with pytest.raises(ChatTemplateError, match="message 0"):
        render("x", messages)


def test_subclasses_of_str_lose_what_they_carry() -> None:
    class Rich(str):
        def secret(self) -> str:
            return "seen"

    messages = [{"role": "user", "content": Rich("plain"), "absent": None}]
    assert render(
        "{{ messages[0].content }}{{ messages[0].content.secret is defined }}", messages
    ) == ("plainFalse")
    assert render("{{ 'absent' in messages[0] }}", messages) == "False"


def test_where_a_folder_keeps_its_template(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder()
    assert open_model(folder).chat_template is None
    for written, expected in [
        ({"chat_template": "one"}, "one"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]},
         "d"),
        ({"chat_template": None}, None),
    ]:  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(written))
        assert open_model(folder).chat_template == expected
    (folder / "chat_template.jinja").write_text("of its own")
    assert open_model(folder).chat_template == "of its own"
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ModelFormatError, match=r"chat_template\.jinja"):
        _ = open_model(folder).chat_template
