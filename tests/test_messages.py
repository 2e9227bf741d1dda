"""Messages name a subject and a remedy in plain words; `python -m tests.messages` lists them."""

import inspect
import re
from functools import cache
from pkgutil import resolve_name

import fusedckpt
from tests.messages import Message, messages

all_messages = cache(lambda: [*messages()])
# the values of a message
VALUE = re.compile(r"\{.*?\}")
SUBJECT = re.compile(r"(\{.+?\}|[\w.]+(\(.*?\))?): |\{.+\}|FUSEDCKPT_\w+ |fusedckpt\S+ ")
# torch's own words for the same errors
OF_TORCH = (
    "one of the variables needed for gradient computation has been modified by an inplace",
    "module {__name__} has no attribute",
)
# exceptions that the library catches: they hold a key, or complete a sentence of their catcher
CAUGHT = re.compile(r"AssertionError|NotApplicable|_Left|_Refused|(self\.)?(log\.)?stopped")
# files whose errors get their subject from their callers
COMPLETED = (
    "fusedckpt/fusing/mixers.py",
    "fusedckpt/planning/plans.py",
    "fusedckpt/reporting/without_memory.py",
)
# words of the code alone, and words without a meaning of their own
OBSCURE = re.compile(r"\b(ours|mend|alone|beside|as well|of then|what)\b")


def has_subject(message: Message) -> bool:
    """Whether a message begins with the function, module or variable that it is about."""
    return bool(
        message.kind == "reason"
        or CAUGHT.fullmatch(message.kind)
        or message.place.startswith(COMPLETED)
        or message.text.startswith(OF_TORCH)
        or SUBJECT.match(message.text)
    )


def is_plain(message: Message) -> bool:
    """Whether a message is short, without a period at its end, and without obscure words."""
    text = VALUE.sub("X", message.text)
    return len(text) <= 320 and not text.endswith(".") and not OBSCURE.search(text)


def test_messages_name_their_subject():
    assert [message for message in all_messages() if not has_subject(message)] == []


def test_messages_are_short_and_plain():
    assert [message for message in all_messages() if not is_plain(message)] == []


def test_reasons_have_a_remedy():
    reasons = [message.text for message in all_messages() if message.kind == "reason"]
    verb_or_call = re.compile(r".+; [a-z]+(\.\w+)*[ (]")
    assert [text for text in reasons if not verb_or_call.match(text)] == []


def test_messages_name_functions_and_arguments_that_exist():
    count = 0
    for message in all_messages():
        text = VALUE.sub("X", message.text)
        for name in re.findall(r"\b((?:fusedckpt|torch)(?:\.[a-zA-Z_]\w*)+)", text):
            # integrations need their libraries
            if ".integrations" not in name:
                resolve_name(name)
                count += 1
        for function, options in re.findall(r"\b(fuse|checkpoint|plan|report)\((.*?)\)", text):
            parameters = inspect.signature(getattr(fusedckpt, function)).parameters
            names = {*re.findall(r"(\w+)=", options)}
            assert names <= parameters.keys(), message
            count += len(names)
    assert count > 30
