"""What users give as a context."""


class Context:
    """What users give as a context: a collector, an environment."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Lookup(Context):
    """A context that looks models up itself."""

    def get_model(self, model_id):
        return self.models[model_id]
