"""Config file, themes and the ASCII fallback: what is wrong is told with its place, never fatal without need."""

from pathlib import Path

import pytest

from schedtop.engine.errors import ConfigError
from schedtop.tui.config import load
from schedtop.tui.drawing import PANELS
from schedtop.tui.keys import BY_ID, KEYS, REPLAY_KEYS, footer, keys_of
from schedtop.tui.theme import ROLES, BadTheme, load_all, parse, shipped


def write(folder: Path, text: str, name: str = "config.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_no_config_file_means_the_defaults(tmp_path: Path) -> None:
    config = load(tmp_path / "config.toml")
    assert config.keys == {}
    assert config.interval_s == 0.25


def test_an_unknown_setting_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'intervals'.*did you mean 'interval_s'"):
        load(write(tmp_path, "intervals = 1"))


def test_an_unknown_key_id_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'abrot'.*did you mean 'abort'"):
        load(write(tmp_path, '[keys]\nabrot = "y"'))


def test_two_actions_on_one_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'q' is given to both"):
        load(write(tmp_path, '[keys]\nabort = "q"'))


@pytest.mark.parametrize("text", ["interval_s = 0", "interval_s = 'x'", "theme = 3", "not toml", "keys = 1"])
def test_a_bad_value_names_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.toml"):
        load(write(tmp_path, text))


def test_a_config_file_that_remaps_keys_is_taken(tmp_path: Path) -> None:
    config = load(write(tmp_path, 'theme = "light"\ninterval_s = 1.5\n[keys]\nabort = "ctrl+x"\ndrain = "D"'))
    assert config.keys == {"abort": "ctrl+x", "drain": "D"}
    assert (config.theme, config.interval_s) == ("light", 1.5)


async def test_a_remapped_key_acts_and_its_old_one_does_not(make_app, busy_link) -> None:
    app = make_app(busy_link, keymap={"freeze": "ctrl+s"})
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("p")
        assert not app._main.ui.is_frozen
        await pilot.press("ctrl+s")
        assert app._main.ui.is_frozen
        await pilot.press("question_mark")
        await pilot.pause()
        assert "Ctrl-s" in app.screen.panel.text()


def test_no_two_keys_of_the_table_clash_and_every_action_exists() -> None:
    from schedtop.tui.screens.main import MainScreen
    from schedtop.tui.screens.replay import ReplayScreen

    names = [name for key in KEYS for name in keys_of(key, {})]
    assert len(names) == len(set(names))
    assert len(BY_ID) == len(KEYS) + len(REPLAY_KEYS)
    for key in BY_ID.values():
        screen = ReplayScreen if key in REPLAY_KEYS else MainScreen
        assert hasattr(screen, f"action_{key.action.partition('(')[0]}"), key.id


def test_destructive_keys_are_no_letters_that_mean_refresh_elsewhere_and_ask_first() -> None:
    for key in KEYS:
        if key.command in ("AbortRequests", "Pause", "HoldRequests"):
            assert "asks first" in key.help
            assert not {"r", "R", "f5", "ctrl+r"} & set(keys_of(key, {}))


def test_the_footer_greys_what_cannot_act() -> None:
    line = footer(200, {}, dead=["abort"])
    assert ("x", "greyed") in line
    assert ("q", "key") in line


def test_all_shipped_themes_give_every_role_a_style() -> None:
    palettes = shipped()
    assert set(palettes) == {"dark", "light", "high-contrast", "colour-blind", "mono"}
    for palette in palettes.values():
        assert set(palette.roles) == set(ROLES)


def test_the_mono_theme_uses_no_colour_at_all() -> None:
    for role in ROLES:
        style = shipped()["mono"].style(role)
        assert style.color is None or style.color.is_default
        assert style.bgcolor is None or style.bgcolor.is_default


@pytest.mark.parametrize("name", ["dark", "light", "high-contrast", "colour-blind"])
def test_text_stands_out_from_its_background(name: str) -> None:
    """WCAG's contrast of 4.5 for whatever must be read, 3 for what is secondary."""
    palette = shipped()[name]
    for role, least in [
        ("text", 4.5),
        ("strong", 4.5),
        ("bad", 4.5),
        ("warn", 4.5),
        ("good", 4.5),
        ("dim", 3.5),
        ("down", 4.5),
    ]:
        style = palette.style(role)
        assert contrast(style.color.triplet, style.bgcolor.triplet) >= least, (name, role)


def contrast(one, other) -> float:
    """WCAG 2 contrast ratio of two colours."""

    def luminance(colour) -> float:
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("name = 'x'", "'roles' is missing"),
        ("name = 'x'\n[roles]\nfoo = 'red'", "no role is called 'foo'"),
        ("name = 'x'\n[roles]\ntext = 'red'", "role 'dim' is missing"),
        ("name = ", "not TOML"),
    ],
)
def test_a_broken_theme_is_refused_with_file_and_fault(text: str, fault: str) -> None:
    with pytest.raises(BadTheme, match=fault):
        parse(text, "mine.toml")


def test_a_broken_theme_of_the_operators_is_reported_and_the_others_load(tmp_path: Path) -> None:
    write(tmp_path, "nonsense", "broken.toml")
    roles = "\n".join(f'{role} = "white on black"' for role in ROLES)
    write(tmp_path, f'name = "mine"\n[roles]\n{roles}', "mine.toml")
    palettes, faults = load_all(tmp_path)
    assert "mine" in palettes
    assert len(faults) == 1
    assert "broken.toml" in faults[0]


async def test_faults_in_settings_are_told_on_screen(make_app, engine_link) -> None:
    app = make_app(engine_link, notes=["theme broken.toml: not TOML"])
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "broken.toml" in app._main.board.panels["action"].text()


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
async def test_without_glyphs_every_panel_and_dialog_is_ascii(make_app, busy_link, size) -> None:
    app = make_app(busy_link, is_ascii=True)
    async with app.run_test(size=size) as pilot:
        for name in PANELS:
            app._main.action_panel(name)
            busy_link.publish()
            await pilot.pause()
            assert drawn(app).isascii(), name
        for key in ("question_mark", "colon", "f2", "x", "A", "F", "enter"):
            await pilot.press(key)
            await pilot.pause()
            assert drawn(app).isascii(), key
            await pilot.press("escape")


def drawn(app) -> str:
    """What the screen on top shows."""
    return "".join(segment.text for strip in app.screen._compositor.render_strips() for segment in strip)


async def test_without_colour_the_mono_theme_is_forced(make_app, busy_link) -> None:
    app = make_app(busy_link, has_colour=False, theme="dark")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("f2", "down", "enter")
        assert app.palette.name == "mono"
