"""An operator at the screen, for its tests. No fixtures in here."""


class Desk:
    """An operator at a running screen: presses keys, reads panels."""

    def __init__(self, app, pilot, link) -> None:
        self.app, self.pilot, self.link = app, pilot, link

    async def press(self, *keys: str) -> None:
        """Press keys, let commands be answered, let the engine publish."""
        for key in keys:
            await self.pilot.press(key)
            await self.pilot.pause()
        self.link.publish()
        await self.pilot.pause()

    async def news(self) -> None:
        self.link.publish()
        await self.pilot.pause()

    @property
    def ui(self):
        return self.app._main.ui

    def panel(self, name: str) -> str:
        """What a panel of the main screen shows, or "dialog": what the dialog over it shows."""
        return self.app.screen.panel.text() if name == "dialog" else self.app._main.board.panels[name].text()

    def sent(self, kind: type) -> list:
        return [command for command in self.link.commands if isinstance(command, kind)]
