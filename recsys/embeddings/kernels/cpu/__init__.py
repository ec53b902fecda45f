"""What is done to rows, each as a plain PyTorch reference and a kernel for the CPU."""
