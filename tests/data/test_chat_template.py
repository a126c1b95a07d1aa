"""What a chat template may take: one error that names it and the limit, and the next conversation is rendered."""

import threading

import pytest

from jaxtp.data import chat_template as limits
from jaxtp.data.chat_template import ChatError, ChatTemplate
from jaxtp.data.worker import Worker

MESSAGES = [{"role": "user", "content": "é"}]
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
TIME, SPACE, EITHER = "takes more than 0.2 s of computing", "takes more than 1,024 MiB of memory", "takes more than "


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.2)


def refused(template, messages=MESSAGES):
    with pytest.raises(ChatError) as raised:
        ChatTemplate(template, "x.jinja", {}).render(messages)
    assert ChatTemplate("{{ messages[0].content }}", "t", {}).render(MESSAGES) == "é"  # by another process, or the same
    return str(raised.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param("{{ 'x' * 3000000000 }}", SPACE, id="a constant"),
        pytest.param("{{ messages[0].content.ljust(10 ** 10) }}", SPACE, id="a method"),
        pytest.param(NESTED, TIME, id="loops"),
        pytest.param("{{ '%1000000000d' % 1 }}", EITHER, id="a width", marks=pytest.mark.wide),
        pytest.param("{{ '{:>1000000000}'.format(1) }}", EITHER, id="a format", marks=pytest.mark.wide),
        pytest.param("{{ 7 ** (10 ** 8) }}", EITHER, id="a power", marks=pytest.mark.wide),
        pytest.param("{{ ('x' * 10 ** 8).join(['a'] * 100) }}", EITHER, id="join", marks=pytest.mark.wide),
        pytest.param("{{ 'x' | center(10 ** 10) }}", SPACE, id="a filter", marks=pytest.mark.wide),
        pytest.param(DOUBLING, EITHER, id="doubling", marks=pytest.mark.wide),
        pytest.param(CALLS, TIME, id="macros", marks=pytest.mark.wide),
        pytest.param("{{ lipsum(n=10 ** 9) }}", EITHER, id="lipsum", marks=pytest.mark.wide),
        pytest.param("{{ messages | tojson(indent=10 ** 10) }}", EITHER, id="tojson", marks=pytest.mark.wide),
        pytest.param("{{ raise_exception('x' * 10 ** 9) }}", EITHER, id="an error", marks=pytest.mark.wide),
    ],
)
def test_what_takes_too_much_is_refused_by_the_limit(short, template, message):
    error = refused(template)
    assert error.startswith(f"x.jinja {message}")
    assert "the limit for a chat template" in error


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "x.jinja: not a chat template: maximum recursion"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "x.jinja: not a chat template: maximum recursion"),
        ("x" * (2**20 + 1), "x.jinja: more than 1,048,576 characters, the limit for a chat template"),
        pytest.param(
            "{{ 'x' * 70000000 }}",
            "x.jinja fails on this conversation: its text has more than 67,108,864 characters",
            marks=pytest.mark.wide,
            id="a long text",
        ),
        ("{{ '\\ud800' }}", "x.jinja fails on this conversation: 'utf-8' codec can't encode"),
        ("{{ 1 | join }}", "x.jinja fails on this conversation: 'int' object is not iterable"),
        ("{{ ''.join(1, 2) }}", "x.jinja fails on this conversation: "),
    ],
)
def test_what_cannot_be_rendered_is_refused_with_its_reason(template, message):
    assert refused(template).startswith(message)


def test_a_day_is_the_present_of_a_template():
    template = ChatTemplate("{{ strftime_now('%A %Y-%m-%d %H:%M:%S') }}", "x", {}, "2024-02-29")
    assert template.render(MESSAGES) == "Thursday 2024-02-29 12:00:00"
    template.day = None
    assert template.render(MESSAGES) != "Thursday 2024-02-29 12:00:00"


def test_a_template_renders_the_same_each_time():
    template = ChatTemplate("{% for i in range(9) %}{{ range(1000) | random }} {% endfor %}", "x", {})
    assert template.render(MESSAGES) == template.render(MESSAGES)


def test_a_message_of_a_template_is_cut():
    assert len(refused("{{ raise_exception('x' * 100000) }}")) < 400


def test_a_process_that_has_ended_is_replaced():
    template = ChatTemplate("{{ messages[0].content }}", "x.jinja", {})
    limits._RENDERER._process.kill()
    limits._RENDERER._process.wait()
    assert template.render(MESSAGES) == "é"


def test_a_process_that_crashes_is_told(monkeypatch, tmp_path):
    (tmp_path / "worker.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(limits, "_RENDERER", Worker(str(tmp_path / "worker.py")))
    with pytest.raises(
        ChatError, match=r"x.jinja crashes the process that renders it \(exit code 3\) when it is loaded"
    ):
        ChatTemplate("", "x.jinja", {})


def test_after_an_interrupt_no_answer_is_taken_for_that_to_another_request(monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}", "x.jinja", {})

    def interrupted(file):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(limits, "read_line", interrupted)
        with pytest.raises(KeyboardInterrupt):
            template.render([{"content": "another"}])
    assert template.render(MESSAGES) == "é"


def test_threads_get_their_own_answers():
    template, found = ChatTemplate("{{ messages[0].content }}", "t", {}), {}

    def ask(number):
        found[number] = [template.render([{"content": f"{number} {i}"}]) for i in range(50)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [f"{number} {i}" for i in range(50)] for number in range(4)}
