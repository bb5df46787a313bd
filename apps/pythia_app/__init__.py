"""The parts of train_pythia.py: options, the training run, checkpoints, and what it prints and draws."""
