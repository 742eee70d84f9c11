"""A small inference engine over triton_kv: reserve, capture, measure, extend, serve. `python -m examples.engine`."""
