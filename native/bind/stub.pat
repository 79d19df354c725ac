# Signatures that the generator of _native.pyi cannot see.

shmsync._native.Reader.read|_native.Reader.read:
    def read(self, *, version: int | None = None, timeout: float | None = None) -> ReadSection:
        \doc

shmsync._native.Reader.refresh|_native.Reader.refresh:
    def refresh(self) -> bool:
        \doc

shmsync._native.ReadSection.stamp|_native.ReadSection.stamp:
    \from shmsync.engine.read.section_values import VersionStamp
    @property
    def stamp(self) -> VersionStamp:
        \doc

shmsync._native.ReadMethods.read|_native.ReadMethods.read:
    def read(self, *, version: int | None = None, timeout: float | None = None) -> ReadSection:
        \doc

shmsync._native.ReadMethods.refresh|_native.ReadMethods.refresh:
    def refresh(self) -> bool:
        \doc

shmsync._native.Guard.__call__|_native.Guard.__call__:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        \doc

