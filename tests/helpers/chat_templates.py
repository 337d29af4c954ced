"""Small equivalents of public chat templates, and a tokenizer with their control tokens."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from helpers.tiny_tokenizer import write_tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from reinforce_rl.data.rendering import TemplateOptions
from reinforce_rl.data.tokenizer import load_tokenizer

# transformers 5.17, of the GPU image, has no such argument.
CAN_SANITIZE = (
    "sanitize_control_tokens"
    in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
)
needs_sanitize = pytest.mark.skipif(
    not CAN_SANITIZE, reason="this transformers cannot sanitize control tokens"
)
SANITIZED_OR_NOT = [TemplateOptions()]
if CAN_SANITIZE:
    SANITIZED_OR_NOT.append(TemplateOptions(sanitize_control_tokens=True))

CONTROL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|User|>",
    "<|Assistant|>",
    "<|end_of_sentence|>",
    "<|calls|>",
    "<|sep|>",
)

TOOL_TOKENS = (
    *("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[INST]", "[/INST]", "</s>", "<|python_tag|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
)

# Writes the begin-of-sequence token and strips contents; a turn ends with a token other than the
# tokenizer's eos.
LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# Like Llama 3.2: has tools and today's date, which an argument may set.
LLAMA32 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# Writes a newline after the token that ends a turn; has tools.
QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content or not message.tool_calls %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>{"name": "' + call.name + '", "arguments": ' }}
            {{- (call.arguments | tojson) + '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Writes a think block before the last answer, empty if there is no reasoning, but not in the
# generation prompt.
QWEN3 = """{%- for message in messages %}
    {%- set content = message.content %}
    {%- set reasoning = '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
    {%- else %}
        {{- content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# Opens a think block in the generation prompt but writes none in an answer; concatenates the
# arguments of calls as strings.
DEEPSEEK = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{{- message['content'] }}{%- endif %}
    {%- if message['role'] == 'user' %}{{- '<|User|>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'tool' %}{{- '<|sep|>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' in message %}
        {{- '<|Assistant|>' + message['content'] }}
        {%- for tool in message['tool_calls'] %}
            {{- '<|calls|>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] }}
        {%- endfor %}
        {{- '<|end_of_sentence|>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|Assistant|>' + content + '<|end_of_sentence|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"""

# Like a model with images: also reads contents that are lists of parts.
PARTS = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


# Like SmolVLM and Idefics3: expects lists of parts and drops contents that are strings.
ONLY_PARTS = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- for part in message.content %}
        {%- if part.type == 'text' %}{{- part.text }}{%- endif %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Has no place for a tool's answer, like Phi-3; removes /no_think from a system message, like
# SmolLM3 and Nemotron.
PHI3 = """{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '<|im_start|>system\\n' + message.content.replace('/no_think', '').rstrip() }}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role in ('user', 'assistant') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Writes a tool's answer as JSON, and the system message before the last user message only, like
# Mistral 7B v0.3.
MISTRAL = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- set ns.system = message.content + '\\n\\n' %}
    {%- elif message.role == 'user' and loop.last %}{{- '<|User|>' + ns.system + message.content }}
    {%- elif message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'tool' %}{{- '<|sep|>' + (message.content | tojson) }}
    {%- else %}{{- '<|Assistant|>' + message.content + '<|end_of_sentence|>' }}{%- endif %}
{%- endfor %}"""

# Like SmolLM2: knows no tools, but writes every role.
SMOLLM2 = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Like Mistral 7B v0.3: tools stand before the last user message, which has the system message while
# nothing follows; calls and results have ids of nine letters, and a tool's message needs its call.
MISTRAL_TOOLS = """{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(ids=[], system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- set ns.system = message.content + '\\n\\n' %}
    {%- elif message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (ns.system if loop.last else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{%- endif %}
            {%- set ns.ids = ns.ids + [call.id] %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id not in ns.ids %}{{- raise_exception('no call') }}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- ' ' + message.content + '</s>' }}{%- endif %}
{%- endfor %}"""
# Like gpt-oss: channels, one call a message, thoughts beside calls until a final answer follows,
# and another end of turn for each.
HARMONY = """{%- set ns = namespace(name=none) %}
{%- for message in messages %}
    {%- set has_final = namespace(later=false) %}
    {%- for later in messages[loop.index:] if later.role == 'assistant' %}
        {%- if 'tool_calls' not in later %}{%- set has_final.later = true %}{%- endif %}
    {%- endfor %}
    {%- if '<|channel|>' in (message.content or '') %}{{- raise_exception('channels') }}{%- endif %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- if message.content and message.thinking %}{{- raise_exception('both') }}{%- endif %}
        {%- if message.thinking and not has_final.later %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- set ns.name = message.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json' }}
        {{- '<|message|>' + (message.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if loop.last and message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last else '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if ns.name is none %}{{- raise_exception('no call before a tool') }}{%- endif %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- (message.content | tojson) + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content }}
        {%- if tools and loop.first %}{{- ' tools: ' + (tools | tojson) }}{%- endif %}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

# A mark after the last message, so that every reply rewrites the one before.
LAST_IS_MARKED = (
    "{% for message in messages %}{{ message['role'][0] | upper }}: {{ message['content'] }}"
    "{% if loop.last %}*{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)

TEMPLATES = {
    "llama3": LLAMA3,
    "llama3.2": LLAMA32,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "deepseek": DEEPSEEK,
    "parts": PARTS,
}


def write_chat_tokenizer(
    folder: Path,
    template: str | None,
    *,
    control_tokens: tuple[str, ...] = CONTROL_TOKENS,
    **special_tokens: str,
):
    """Write a character-level tokenizer with these control tokens, and load it."""
    tokenizer = load_tokenizer(write_tiny_tokenizer(folder, 160))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(control_tokens), **special_tokens}
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder)
