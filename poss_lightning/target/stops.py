"""The tokens with which an answer ends."""

import logging

from transformers import GenerationConfig, PreTrainedTokenizerFast

from poss_lightning.target.spelling import any_of
from poss_lightning.target.template import Template

logger = logging.getLogger(__name__)


def find_stops(
    tokenizer: PreTrainedTokenizerFast, generation_config: GenerationConfig | None, template: Template
) -> frozenset[int]:
    """The stop tokens of tokenizer and generation config, and the one that the template writes after every answer."""
    ids = getattr(generation_config, "eos_token_id", None)
    ids = ids if isinstance(ids, list) else [ids]
    stops = frozenset(token for token in (*ids, tokenizer.eos_token_id) if isinstance(token, int))
    return stops | _turn_ends(tokenizer, template, stops)


def _turn_ends(tokenizer: PreTrainedTokenizerFast, template: Template, stops: frozenset[int]) -> frozenset[int]:
    """The token that the template writes after every answer, whether the chat continues or not, if there is one."""
    known = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    added = any_of(known)
    ends = [found[0] if (found := added.match(tail.lstrip())) else "" for tail in template.after_answers()]
    if ends and not ends[0] and ends[1] and known[ends[1]] not in stops:
        logger.warning("%s stands after an answer where the chat continues, and is not a stop token", ends[1])
    return frozenset(known[end] for end in ends) if len({*ends}) == 1 and "" not in ends else frozenset()
