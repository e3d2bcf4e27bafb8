// Before the first paint: follow the reader's light or dark setting, and its changes.
(function () {
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  function apply() { document.documentElement.setAttribute("data-bs-theme", dark.matches ? "dark" : "light"); }
  apply();
  dark.addEventListener("change", apply);
})();
