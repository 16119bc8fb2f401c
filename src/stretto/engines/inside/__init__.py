"""What runs inside the processes of SGLang and vLLM. Imports nothing but torch, numpy, safetensors and stretto.sync.

Those engines pin their own versions of everything else, and may run with another interpreter than the trainer.
"""
