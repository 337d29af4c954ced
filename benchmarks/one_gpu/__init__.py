"""Generation, training and a whole step on one device, by this project and by plain PyTorch with transformers."""
