"""Chat templates: prompts are those of transformers, and no text of a message is lost on the way to the model."""

import json

import pytest
from jinja2.exceptions import TemplateError
from tokenizer_kinds import KINDS, save
from transformers import AutoTokenizer

from mooncake_lab.serving.openai_api.chat_template import ChatTemplate, Message
from mooncake_lab.serving.openai_api.parsing import BadRequestError, Reader
from mooncake_lab.serving.openai_api.tokenizer import HuggingFaceTokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}[S]{{ m.content }}"
    "{% elif m.role == 'user' %}[U]{{ m.content }}"
    "{% elif m.role == 'assistant' %}[A]{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}[A]"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}\n"
    "{% endfor %}<turn>model\n"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for c in m['content'] %}{% if c.type == 'text' %}"
    "{{ c.text }}{% endif %}"
    "{% endfor %}{% endfor %}[AST]"
)
EITHER = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ c['text'] }}|{% endfor %}{% endif %}{% endfor %}"
)
SYSTEM_STRING = (
    "{% for m in messages %}{% if m.role == 'system' %}[S]{{ m.content }}{% else %}"
    "{% for c in m.content if c.type == 'text' %}[U]{{ c.text }}{% endfor %}{% endif %}{% endfor %}"
)
ONLY_PARTS = "{% for m in messages %}{% if m.content is string %}{{ raise_exception('parts only') }}{% endif %}"
ONLY_PARTS += "{{ m.content[0]['text'] }}{% endfor %}"
THINKING = (
    "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}[{{ m.role }}]{{ text }}{% endfor %}<think>\n"
)
ABILITIES = (
    "{%- set ns = namespace(seen=0) -%}{{- strftime_now('%Y') }}\n{%- for m in messages %}"
    "    {%- if m.role == 'nobody' %}{% continue %}{% endif %}\n  {%- set ns.seen = ns.seen + 1 %}"
    "{{ m | tojson }} {{ dict(a=1) | tojson(indent=2) }} {{ {'b': 'é<', 'a': 1} | tojson(sort_keys=true) }}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% if ns.seen > 90 %}{% break %}{% endif %}{% endfor %}"
    "{{ ns.seen }}{{ tools is none }}{{ documents is none }}{{ pad_token is defined }}{{ unk_token }}"
)
SAME = {
    "chatml": CHATML, "known roles": KNOWN_ROLES, "llama 2": LLAMA2, "no system": NO_SYSTEM,
    "abilities": ABILITIES,    "thinking": THINKING, "either": EITHER,
}  # fmt: skip
CHATS = [
    [("user", "hi")],
    [("user", "hi"), ("assistant", "you"), ("user", "  where? ")],
    [("system", "be kind"), ("user", "你好"), ("assistant", "<think>a</think>b"), ("user", "c")],
    [("user", "say \"x\" and 'y' \\ <b>&amp;</b>\n"), ("assistant", ""), ("user", "</s><s>")],
    [("user", "a"), ("user", "b")],
    [("assistant", "first")],
]


def messages(chat):
    return [Message(role, (text,)) for role, text in chat]


def parts(chat):
    return [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in chat]


@pytest.mark.parametrize("name", SAME)
def test_prompts_are_those_of_transformers(tmp_path, name):
    """Ids of each conversation are those of `apply_chat_template`; what it refuses is refused with its reason."""
    save(KINDS["byte_level"](), tmp_path)
    settings = SPECIAL | {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": SAME[name]}))
    ours, theirs = HuggingFaceTokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for chat in CHATS:
        turns = [{"role": role, "content": text} for role, text in chat]
        try:
            expected = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        except (TemplateError, ValueError) as error:
            with pytest.raises(ValueError, match=str(error)):
                ours.encode_chat(messages(chat))
        else:
            assert ours.encode_chat(messages(chat)) == expected


@pytest.mark.parametrize(
    ("template", "chat", "prompt"),
    [
        (PARTS, [("user", "hi")], "[user]hi[AST]"),
        (PARTS, [("system", "s"), ("user", "hi"), ("assistant", "")], "[system]s[user]hi[assistant][AST]"),
        (SYSTEM_STRING, [("system", "s"), ("user", "hi")], "[S]s[U]hi"),
        (ONLY_PARTS, [("user", "hi"), ("assistant", "you")], "hiyou"),
        (KNOWN_ROLES, [("developer", "be kind"), ("user", "hi")], "[S]be kind[U]hi[A]"),
        (CHATML.replace("m['role']", "m.role"), [("developer", "d"), ("user", "u")],
         "<|im_start|>developer\nd<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA2, [("developer", "d"), ("user", "u")], "<s>[INST] <<SYS>>\nd\n<</SYS>>\n\nu [/INST]"),
        (EITHER, [("user", "hi")], "[user]hi"),
        (THINKING, [("user", "a"), ("assistant", "<think>b</think>")], "[user]a[assistant]<think>"),
    ],
)  # fmt: skip
def test_messages_are_handed_over_as_the_template_takes_them(template, chat, prompt):
    """Content is a string or a list of parts, and `developer` is `system`, where otherwise text would be lost."""
    assert ChatTemplate(template, SPECIAL).render(messages(chat)) == prompt


def test_parts_of_the_client_stay_parts():
    """A template over parts gets those that the client sent; one over strings gets them joined."""
    chat = [Message("user", ("a", "b"))]
    assert ChatTemplate(PARTS, {}).render(chat) == "[user]ab[AST]"
    assert ChatTemplate(PARTS.replace("{{ c.text }}", "<{{ c.text }}>"), {}).render(chat) == "[user]<a><b>[AST]"
    assert ChatTemplate(KNOWN_ROLES, {}).render(chat) == "[U]ab[A]"


@pytest.mark.parametrize(
    ("template", "chat", "says"),
    [
        (KNOWN_ROLES.replace("'assistant'", "'model'"), [("user", "a"), ("assistant", "b"), ("user", "c")],
         r"drops text of message 1 \(role assistant\)"),
        ("{{ messages[-1].content }}", [("user", "a"), ("assistant", "b"), ("user", "c")], "message 0"),
        ("{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
         [("user", "a"), ("system", "b")], r"message 1 \(role system\)"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
         [("developer", "d"), ("user", "a")],
         r"message 0 \(role developer\)"),
        (NO_SYSTEM, [("system", "s"), ("user", "a")], "System role not supported"),
        (NO_SYSTEM, [("developer", "s"), ("developer", "a")], None),
        (LLAMA2, [("system", "s")], "message 0"),
        (LLAMA2, [("user", "s"), ("user", "s")], "roles must alternate"),
        ("{% for m in messages %}{{ m.content[:30] }}{% endfor %}", [("user", "word " * 9 + "end")], "message 0"),
        ("fixed", [("user", "a")], "message 0"),
        ("{{ messages[0].content.upper.__class__ }}", [("user", "a")], "message 0"),
        ("{% set ns = namespace(_a=1) %}{{ messages[0].content }}", [("user", "a")], "_a"),
        ("{% for m in messages %}", [("user", "a")], "is not valid Jinja: line 1: "),
        ("{{ messages[0].content + 1 }}", [("user", "a")], "refuses this conversation"),
    ],
)  # fmt: skip
def test_what_a_template_would_drop_is_refused(template, chat, says):
    """A conversation of which the model would not see all is an error with the message or the template's words."""
    chat_template = ChatTemplate(template, SPECIAL)
    if says is None:
        assert "<turn>developer\ns" in chat_template.render(messages(chat))
        return
    with pytest.raises(ValueError, match=says) as raised:
        chat_template.render(messages(chat))
    assert str(raised.value).startswith("the model's chat template ")


def test_a_shape_is_examined_once(monkeypatch):
    """Conversations of the same roles cost one rendering each, however many there are."""
    template, calls = ChatTemplate(CHATML, {}), []
    rendered = ChatTemplate._rendered
    monkeypatch.setattr(ChatTemplate, "_rendered", lambda *args: calls.append(1) or rendered(*args))
    for index in range(50):
        template.render(messages([("system", f"s{index}"), ("user", f"u{index}")]))
    assert len(calls) == 51


def reader(directory, template):
    save(KINDS["byte_level"](), directory)
    settings = SPECIAL | ({} if template is None else {"chat_template": template})
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return Reader(tokenizer=HuggingFaceTokenizer(directory), model="m", most_tokens=1000)


def ask(found, *turns):
    return found.chat(
        json.dumps({"model": "m", "messages": [{"role": r, "content": c} for r, c in turns]}).encode()
    )


def test_a_request_that_would_lose_text_is_refused(tmp_path):
    """A chat of which the model would not see all, or without a template, is an error about `messages`."""
    for template, says in (
        (KNOWN_ROLES[:-3], None),
        ("{{ messages[-1].content }}", "drops text"),
        (None, "no chat"),
    ):
        found = reader(tmp_path, template)
        if says is None:
            expected = found.tokenizer.encode("[S]d[U]hi", adds_special=False)
            parsed = ask(found, ("developer", "d"), ("user", [{"type": "text", "text": "hi"}]))
            assert parsed.prompts[0].tolist() == expected
            continue
        with pytest.raises(BadRequestError, match=says) as raised:
            ask(found, ("user", "a"), ("user", "b"))
        assert raised.value.param == "messages"


def test_the_template_in_its_own_file_counts_more(tmp_path):
    """`chat_template.jinja` replaces the field of `tokenizer_config.json`; of a list the default one counts."""
    several = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "old {{ messages[0].content }}"},
    ]
    found = reader(tmp_path, several)
    assert ask(found, ("user", "a")).prompts[0].tolist() == found.tokenizer.encode("old a", adds_special=False)
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    found = reader(tmp_path, several)
    assert ask(found, ("user", "a")).prompts[0].tolist() == found.tokenizer.encode("new a", adds_special=False)
