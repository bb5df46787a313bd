"""Have ``transformers`` write the model of pythia_tiny.npz as it writes any model, in three shards. Needs torch and transformers.

    python tests/golden/make_published_golden.py

writes pythia_tiny_published/ beside this file: what ``Pythia.from_pretrained`` is to read, and ``save_pretrained`` to match.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent

if __name__ == "__main__":
    config = transformers.GPTNeoXConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPTNeoXForCausalLM(config)
    with np.load(HERE / "pythia_tiny.npz") as golden, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(golden[f"weight/{name.replace('lm_head.', 'embed_out.')}"]))
    folder = HERE / "pythia_tiny_published"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size="40KB")
    (folder / "generation_config.json").unlink()
    print(*(f"{path.name}: {path.stat().st_size} bytes" for path in sorted(folder.iterdir())), sep="\n")
