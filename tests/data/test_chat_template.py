"""What a chat template may take: one error that names it and the limit, and the next
conversation is rendered.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from corpora import write
from support import swept
from tables import read_table

from jaxtp.data import chat_template as limits
from jaxtp.data.chat_template import ChatError, ChatTemplate
from jaxtp.data.worker import Worker

TABLES = read_table(__file__)

MESSAGES = [{"role": "user", "content": "é"}]


def refused(template, seconds=limits.SECONDS):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "SECONDS", seconds)
        with pytest.raises(ChatError) as raised:
            ChatTemplate(template, "x.jinja", {}).render(MESSAGES)
    # by another process, or the same
    assert ChatTemplate("{{ messages[0].content }}", "t", {}).render(MESSAGES) == "é"
    return str(raised.value)


TOO_MUCH = TABLES["too much"]


@swept("kind", TOO_MUCH, "a constant", "a method", "loops")
def test_a_template_that_takes_too_much_is_refused_by_the_limit(kind):
    template, message = TOO_MUCH[kind]
    # Loading a template in a new process may take 0.2 s, so the limit of memory gets more time.
    seconds = limits.SECONDS if "memory" in message else 0.2
    error = refused(template, seconds)
    assert error.startswith(f"x.jinja {message}")
    assert "the limit for a chat template" in error


UNUSABLE = TABLES["unusable"] | {
    "nested brackets": (
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "x.jinja: not a chat template: maximum recursion",
    ),
    "nested blocks": (
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "x.jinja: not a chat template: maximum recursion",
    ),
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
