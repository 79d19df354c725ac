"""What users give as a context."""


class Context:
    """What users give as a context: a collector, an environment."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Lookup(Context):
    """A context that looks models up itself."""

    def get_model(self, model_id):
        return self.models[model_id]


class Stubborn(Exception):
    """Pickles, and fails on the way back."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Failing(Context):
    """A context whose model is not there yet when its receiver is made, and cannot be made later either."""

    def get_model(self, model_id):
        if not self.ready:
            raise KeyError(model_id)
        return model_of_worker(self)


def model_of_worker(context):
    if context.error is not None:
        raise context.error
    return context.model
