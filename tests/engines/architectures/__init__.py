"""Records of model classes: which tensors each public class of transformers has, by its config.

probing    builds the classes for many configs of a model type
fitting    finds shapes and presence of tensors as functions of the config
recording  writes `src/reshard/checkpoint/architectures/recorded`

    PYTHONPATH=src:tests .engines/transformers/bin/python -m engines.architectures llama bert
    ...all model types of the shipped recipes without arguments
"""
