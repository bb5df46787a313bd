"""Ids that transformers gives with Pythia's published tokenizer. Needs transformers and 20B_tokenizer.json.

    python tests/golden/make_tokenizer_golden.py path/to/20B_tokenizer.json

writes published_tokenizer.json beside this file: the number of ids, and texts with their ids.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import transformers

HERE = Path(__file__).parent
TEXTS = [
    "The small deep-learning framework that never leaks a graph, written from scratch over swappable backends.",
    (HERE / "README.md").read_text(encoding="utf-8"),
    (HERE / "formula.py").read_text(encoding="utf-8"),
    'def f(x):\n\treturn {"a": [x**2 for x in range(10)]}  # tabs,   runs of spaces\r\n\n\n        deep = 0x1F + 3.14e-10\n',
    "Été à Zürich, naïve façade; e\u0301 is é in two parts. Ω ≈ ∑ ½ ﬁ Å",
    "漢字とかな、한국어, Русский текст, العربية, हिन्दी, 🙂👩‍👩‍👧 \u200b\ufeff\u00a0",
    "<|endoftext|>one<|padding|>two <|endoftext|>",
    "https://example.org/a_b?c=%20&d=1234567890#x  JOHN'S they're I'LL 've\t\t\t \n \n",
]

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(sys.argv[1], Path(folder, "tokenizer.json"))
        tokenizer = transformers.GPTNeoXTokenizer.from_pretrained(folder)
        texts = [[text, tokenizer(text)["input_ids"]] for text in TEXTS]
        made = {"transformers": transformers.__version__, "size": len(tokenizer), "texts": texts}
    (HERE / "published_tokenizer.json").write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")
    print(f"{sum(len(ids) for _, ids in texts)} ids, {len(tokenizer)} in the vocabulary")
