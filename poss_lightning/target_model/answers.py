"""What an answer adds to its prompt, in letters: its thoughts, its content, its calls, and the stop that ends it."""

from bisect import bisect_left
from dataclasses import dataclass, replace
from os.path import commonprefix

from poss_lightning.target_model.template import MARK, THOUGHTS, Message, Template, Variables
from poss_lightning.target_model.thoughts import empty_thought, opened_thought, thought_of

SHORT = 6  # letters that a prompt's end and an answer's beginning may share by chance


@dataclass(frozen=True)
class Answer:
    """An answer in its text: `prompt` + `lead` + `written` + `next_stop`."""

    prompt: str
    lead: str  # what the template puts before it: an empty thought
    written: str | list[int]  # letters; or tokens, if a target wrote it
    next_stop: str = ""  # the stop token that ends it as it begins the next message

    @property
    def before(self) -> str:
        return self.prompt + self.lead


class AnswerFinder:
    """Finds answers in the texts of a template; messages are numbered in a conversation from 0.

    Args:
        template: renders the conversations.
        stops: texts of the stop tokens.
    """

    def __init__(self, template: Template, stops: tuple[str, ...]):
        self.template, self.stops = template, stops

    def find(self, messages: list[Message], i: int, variables: Variables) -> Answer:
        r"""Find what message i adds to its prompt: up to the first stop token or, without one, the end of its content.

            finished   …<|im_start|>assistant\nHello<|im_end|>\n
                       \_________ prompt __________/\_____ tail _____/

        what the prompt opens   tail                            what is written
        -                       Hello<|im_end|>\n               Hello<|im_end|>
        -                       Hello\n  (no stop token)        Hello, and the stop token that begins the next message
        -                       <think></think>Hello<|im_end|>  Hello<|im_end|>, after a lead that nobody wrote
        -                       Hello<|im_end|>                 <think>a</think>Hello<|im_end|>, if that is the content
        <think>                 Hello<|im_end|>                 a</think>Hello<|im_end|>, the rest of that content
        <think></think>         Hello<|im_end|>                 Hello<|im_end|>
        <think> or not          whatever                        a  (cut within its thought, which has no end)

        Raises:
            ValueError: the template leaves out some of what the message says, or writes something else.
        """
        message, prompt = messages[i], self.template.prompt(messages[:i], variables)
        if tokens := message.get("tokens"):
            return Answer(prompt, "", tokens)
        content, thought = message["content"], thought_of(prompt)
        # A thought that was cut short has no end, so no template finds it: it is taken as it stands.
        opening = thought if thought.is_open else opened_thought(content)
        if _is_cut(message) and not _thoughts(message) and opening.is_open and opening.close not in content:
            return self._close_once(Answer(prompt, "", content), message, i)
        finished, calls = self.template.text(messages[: i + 1], variables), _calls(message)
        opened, tail = _parted(prompt, finished, content.strip() or "".join(calls[:1]))
        thoughts = _thoughts(message)
        if thoughts and thought.is_open and _squeeze(thoughts) not in _squeeze(tail):  # the template reads its content
            inline = thoughts if _is_cut_thought(message) else f"{thought.text}{thoughts}\n{thought.close}\n\n{content}"
            bare = {key: part for key, part in message.items() if key not in THOUGHTS}
            return self.find([*messages[:i], bare | {"content": inline}], i, variables)
        if not self.template.opens_answers and not tail.lstrip().startswith(content.strip()):
            raise ValueError(f"message {i}: the chat template heads it {tail[:40]!r} but has no generation prompt")
        return self._close_once(self._in_tail(messages, i, variables, prompt, opened, tail), message, i)

    def _in_tail(
        self, messages: list[Message], i: int, variables: Variables, prompt: str, opened: str, tail: str
    ) -> Answer:
        """Find message i in what follows its prompt, of whose end the finished text lacks `opened`."""
        message, content = messages[i], messages[i]["content"]
        stop = min((text for text in self.stops if text in tail), key=tail.index, default="")
        body, end = tail.partition(stop)[0] if stop else tail, "" if _is_cut(message) else stop
        meant, shown = _squeeze(content), _squeeze(body)
        self._check_said(message, i, shown)
        if meant not in shown:
            if not shown or not meant.endswith(shown):
                raise ValueError(f"message {i}: the chat template writes {body[:40]!r} for {content[:40]!r}")
            # What the template drops: thoughts; or their opening alone, if the prompt has it.
            if not _squeeze(prompt.removesuffix(opened)).endswith(meant.removesuffix(shown)):
                return Answer(prompt, "", _after(opened, content) + end)
        if opened and empty_thought(opened) != opened:
            reason = f"opens an answer with {opened!r} and later drops that"
            raise ValueError(f"message {i}: the chat template {reason}{self.template.switch}")
        body = _without_end(body, message, bool(stop))
        lead = ""
        if not _thoughts(message) and meant in shown and not (meant and shown.startswith(meant)):
            framed = self.template.text([*messages[:i], {"role": "assistant", "content": MARK}], variables)
            lead = empty_thought(_parted(prompt, framed, MARK)[1].partition(MARK)[0])
            lead = lead if body.startswith(lead) else ""
        written = body[len(lead) :] + end
        next_stop = "" if stop or _is_cut(message) else self._next_stop(messages, i, written, variables)
        return Answer(prompt, lead, written, next_stop)

    def _next_stop(self, messages: list[Message], i: int, written: str, variables: Variables) -> str:
        """Return the stop token that ends an answer as it begins the next message, as `<|user|>` does; or ""."""
        role = "tool" if messages[i].get("tool_calls") else "user"
        following = messages[i + 1] if i + 1 < len(messages) else {"role": role}
        try:
            text = self.template.text([*messages[: i + 1], following | {"content": MARK}], variables).partition(MARK)[0]
        except ValueError:
            return ""
        endings = [(text.rpartition(stop)[0], stop) for stop in self.stops]
        return next((stop for before, stop in endings if before.endswith(written[-SHORT:])), "")

    def _check_said(self, message: Message, i: int, shown: str) -> None:
        """Raise ValueError if an answer's thoughts or tool calls are missing from what is shown of it."""
        if _squeeze(_thoughts(message)) not in shown:
            reason = "leaves out its thoughts (reasoning_content)"
            raise ValueError(f"message {i}: the chat template {reason}{self.template.switch}")
        names = [_squeeze(name) for name in _calls(message)]
        if missing := [name for name in names if shown.count(name) < names.count(name)]:
            raise ValueError(f"message {i}: the chat template leaves out its call of {missing[0]!r}")

    def _close_once(self, answer: Answer, message: Message, i: int) -> Answer:
        """Drop the opening of an answer's thought if the prompt has it.

        ValueError if it does not close that thought, or closes one that the prompt has closed.
        """
        written, in_prompt, thought = str(answer.written), thought_of(answer.prompt), thought_of(answer.before)
        if in_prompt.close and not in_prompt.is_open and in_prompt.close in written:
            reason = "it has thoughts, and the chat template closes them before it is written"
            raise ValueError(f"message {i}: {reason}{self.template.switch}")
        if thought.is_open and thought.close not in written and not _is_cut(message):
            reason = "the chat template opens a thought that the answer does not close"
            raise ValueError(f"message {i}: {reason}{self.template.switch}")
        return replace(answer, written=_after(thought.mark, written)) if thought.is_open else answer


def _is_cut(message: Message) -> bool:
    return message.get("finish_reason") == "length"


def _thoughts(message: Message) -> str:
    return next((message[name].strip() for name in THOUGHTS if message.get(name)), "")


def _calls(message: Message) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


def _is_cut_thought(message: Message) -> bool:
    """Return whether a message is a thought alone that was cut."""
    return _is_cut(message) and not message["content"].strip() and not _calls(message)


def _without_end(body: str, message: Message, stops: bool) -> str:
    """Return what an answer's text has up to its end: a stop, a cut, or else the end of its content."""
    thoughts, content = _thoughts(message), message["content"]
    if thoughts and _is_cut_thought(message) and thoughts in body:
        return body[: body.rindex(thoughts) + len(thoughts)]
    if stops:
        return body
    last = "" if _calls(message) else content if content in body else content.strip()
    return body[: body.rindex(last) + len(last)] if last and last in body else body.rstrip()


def _parted(prompt: str, finished: str, said: str) -> tuple[str, str]:
    """Return what a finished text lacks of its prompt's end, and what follows the rest.

    Text far before an answer may change once it is finished: a system message that stands only before the last user's.
    """
    shared = len(commonprefix([prompt, finished]))  # noqa: RUF071, letter by letter
    if shared < len(prompt):
        shared = min(shared, len(prompt) - len(thought_of(prompt).text))  # never inside its marks
    rest = finished[shared:]  # which has the longest end of the prompt from here on, and so every shorter one
    begin = bisect_left(range(len(prompt)), True, lo=shared, key=lambda n: prompt[n:] in rest)
    _, found, tail = rest.rpartition(prompt[begin:] or MARK)
    if shared < len(prompt) and len(found) > SHORT and said and said in tail:
        return "", tail
    return prompt[shared:], rest


def _squeeze(text: str) -> str:
    """Remove white space: templates trim and indent."""
    return "".join(text.split())


def _after(opened: str, content: str) -> str:
    """Return a content without `opened`, with which its prompt ends, if the content repeats it."""
    opened, start = opened.strip(), content.lstrip()
    return start.removeprefix(opened).lstrip() if opened and start.startswith(opened) else content
