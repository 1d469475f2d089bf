"""GGUF files: Llama-type ones as folders of transformers, and models of headwise as what llama.cpp can run."""
