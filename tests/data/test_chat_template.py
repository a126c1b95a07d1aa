"""What a chat template may take: one error that names it and the limit, and the next
conversation is rendered.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from corpora import write
from support import swept

from jaxtp.data import chat_template as limits
from jaxtp.data.chat_template import ChatError, ChatTemplate
from jaxtp.data.worker import Worker

MESSAGES = [{"role": "user", "content": "é"}]
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% "
    "endfor %}{{ n.x }}"
)
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
TIME = "takes more than 0.2 s of computing"
SPACE = "takes more than 1,024 MiB of memory"
EITHER = "takes more than "


def refused(template):
    with pytest.raises(ChatError) as raised:
        ChatTemplate(template, "x.jinja", {}).render(MESSAGES)
    # by another process, or the same
    assert ChatTemplate("{{ messages[0].content }}", "t", {}).render(MESSAGES) == "é"
    return str(raised.value)


TOO_MUCH = {
    "a constant": ("{{ 'x' * 3000000000 }}", SPACE),
    "a method": ("{{ messages[0].content.ljust(10 ** 10) }}", SPACE),
    "loops": (NESTED, TIME),
    "a width": ("{{ '%1000000000d' % 1 }}", EITHER),
    "a format": ("{{ '{:>1000000000}'.format(1) }}", EITHER),
    "a power": ("{{ 7 ** (10 ** 8) }}", EITHER),
    "join": ("{{ ('x' * 10 ** 8).join(['a'] * 100) }}", EITHER),
    "a filter": ("{{ 'x' | center(10 ** 10) }}", SPACE),
    "doubling": (DOUBLING, EITHER),
    "macros": (CALLS, TIME),
    "lipsum": ("{{ lipsum(n=10 ** 9) }}", EITHER),
    "tojson": ("{{ messages | tojson(indent=10 ** 10) }}", EITHER),
    "an error": ("{{ raise_exception('x' * 10 ** 9) }}", EITHER),
}


@swept("kind", TOO_MUCH, "a constant", "a method", "loops")
def test_a_template_that_takes_too_much_is_refused_by_the_limit(monkeypatch, kind):
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    template, message = TOO_MUCH[kind]
    error = refused(template)
    assert error.startswith(f"x.jinja {message}")
    assert "the limit for a chat template" in error


FAILS = "x.jinja fails on this conversation: "
UNUSABLE = {
    "nested brackets": (
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "x.jinja: not a chat template: maximum recursion",
    ),
    "nested blocks": (
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "x.jinja: not a chat template: maximum recursion",
    ),
    "a long text": ("{{ 'x' * 70000000 }}", f"{FAILS}its text has more than 67,108,864 characters"),
    "half a character": ("{{ '\\ud800' }}", f"{FAILS}'utf-8' codec can't encode"),
    "no tools": (
        "{% for tool in tools %}{% endfor %}",
        f"{FAILS}'NoneType' object is not iterable; it loops over 'tools', and there are none here",
    ),
    "a number": ("{{ 1 | join }}", f"{FAILS}'int' object is not iterable"),
    "arguments": ("{{ ''.join(1, 2) }}", FAILS),
}


@swept("kind", UNUSABLE, *(UNUSABLE.keys() - {"a long text"}))
def test_a_template_that_cannot_be_rendered_is_refused_with_its_reason(kind):
    template, message = UNUSABLE[kind]
    assert refused(template).startswith(message)


def test_a_day_is_the_present_of_a_template():
    template = ChatTemplate("{{ strftime_now('%A %Y-%m-%d %H:%M:%S') }}", "x", {}, "2024-02-29")
    assert template.render(MESSAGES) == "Thursday 2024-02-29 12:00:00"
    template.day = None
    assert template.render(MESSAGES) != "Thursday 2024-02-29 12:00:00"


def test_a_message_of_a_template_is_cut():
    assert len(refused("{{ raise_exception('x' * 100000) }}")) < 400


def test_a_process_that_has_ended_is_replaced():
    template = ChatTemplate("{{ messages[0].content }}", "x.jinja", {})
    limits.WORKER.process.kill()
    limits.WORKER.process.wait()
    assert template.render(MESSAGES) == "é"


def test_a_process_that_crashes_is_an_error(monkeypatch):
    monkeypatch.setattr(limits, "WORKER", Worker(str(write("worker.py", "raise SystemExit(3)"))))
    with pytest.raises(
        ChatError, match=r"x.jinja crashes the process .* \(exit code 3\) when it is loaded"
    ):
        ChatTemplate("", "x.jinja", {})


def test_after_an_interrupt_no_answer_is_taken_for_that_to_another_request(monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}", "x.jinja", {})

    def interrupted(file, size):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("jaxtp.data.worker._read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            template.render([{"content": "another"}])
    assert template.render(MESSAGES) == "é"


def test_threads_get_their_own_answers():
    template = ChatTemplate("{{ messages[0].content }}", "t", {})
    numbers = list(map(str, range(100)))
    with ThreadPoolExecutor(4) as threads:
        assert (
            list(threads.map(lambda number: template.render([{"content": number}]), numbers))
            == numbers
        )
