"""Run by lm-eval's own environment: loglikelihoods of its API model, printed as JSON."""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, model, directory = sys.argv[1:]
pairs = [("The quick brown", " fox"), ("Two and two are", " four"), ("a", "b")]
lm = LocalCompletionsAPI(
    base_url=f"{url}/v1/completions",
    model=model,
    tokenizer=directory,
    tokenizer_backend="huggingface",
    num_concurrent=1,
    batch_size=1,
)
requests = [Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(pairs)]
found = lm.loglikelihood(requests, disable_tqdm=True)
encoded = [(lm.tok_encode(context), lm.tok_encode(context + rest)) for context, rest in pairs]
print("RESULT " + json.dumps({"scores": found, "tokens": encoded}))
