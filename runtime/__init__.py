"""Execute a plan: native code, its build, its bindings, and llama.cpp underneath."""
